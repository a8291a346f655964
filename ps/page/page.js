"use strict"
// Updates the page with the server's events, and sends the buttons' requests. The page also works without this script.

const live = document.getElementById("live")
const news = document.getElementById("news")
const form = document.getElementById("actions")
const token = document.getElementById("token")
const answer = document.getElementById("answer")

// The token is in the URL's fragment, which browsers do not send. Remove it from the address bar at once.
function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token")
  if (given) {
    sessionStorage.setItem("token", given)
    history.replaceState(null, "", location.pathname + location.search)
  }
  token.value = given || sessionStorage.getItem("token") || ""
}

function made(html, old) {
  const template = document.createElement("template")
  if (old.namespaceURI === "http://www.w3.org/2000/svg") {
    template.innerHTML = `<svg>${html}</svg>`
    return template.content.firstElementChild.firstElementChild
  }
  template.innerHTML = html
  return template.content.firstElementChild
}

// The user's state in an element that is about to be replaced: focus, open details, scroll positions.
function remember(old) {
  const saved = { focus: null, scrolled: [], open: [] }
  if (document.activeElement.id && old.contains(document.activeElement)) saved.focus = document.activeElement.id
  for (const box of old.querySelectorAll(".scroll[id]")) saved.scrolled.push([box.id, box.scrollLeft, box.scrollTop])
  for (const each of old.querySelectorAll("details[id][open]")) saved.open.push(each.id)
  return saved
}

function restore(saved) {
  for (const id of saved.open) document.getElementById(id)?.setAttribute("open", "")
  for (const [id, left, top] of saved.scrolled) document.getElementById(id)?.scrollTo(left, top)
  if (saved.focus) document.getElementById(saved.focus)?.focus({ preventScroll: true })
}

function replace(id, html) {
  const old = document.getElementById(id)
  if (!old) return
  const fresh = made(html, old)
  if (old.isEqualNode(fresh)) return
  const saved = remember(old)
  old.replaceWith(fresh)
  restore(saved)
}

const SVG = "http://www.w3.org/2000/svg"
let pointed = null // the chart under the pointer, by id, and the pointer's place in the window

// Shows a curve's value under the pointer in its caption, with a line at its step.
function showValue(chart, x) {
  const steps = chart.dataset.steps.split(" ").map(Number)
  const values = chart.dataset.values.split(" ")
  const area = chart.querySelector("svg").getBoundingClientRect()
  const first = steps[0], across = steps[steps.length - 1] - first || 1
  const step = first + across * (x - area.left) / area.width
  const near = steps.reduce((best, each, index) => Math.abs(each - step) < Math.abs(steps[best] - step) ? index : best, 0)
  let line = chart.querySelector(".pointer")
  if (!line) {
    line = chart.appendChild(document.createElementNS(SVG, "line"))
    line.setAttribute("class", "pointer")
    line.setAttribute("y2", "100%")
  }
  for (const end of ["x1", "x2"]) line.setAttribute(end, `${100 * (steps[near] - first) / across}%`)
  chart.closest("figure").querySelector(".value").textContent = `${values[near]} at ${chart.dataset.unit} ${steps[near].toLocaleString("en")}`
}

function hideValue(chart) {
  chart.querySelector(".pointer")?.remove()
  chart.closest("figure").querySelector(".value").textContent = chart.dataset.values.split(" ").pop()
}

function point(event) {
  const chart = event.target.closest?.(".curve")
  const left = pointed && document.getElementById(pointed.id)
  if (left && left !== chart) hideValue(left)
  pointed = chart ? { id: chart.id, x: event.clientX } : null
  if (chart) showValue(chart, pointed.x)
}

function show(message) {
  const { elements, news: sentences } = JSON.parse(message.data)
  for (const [id, html] of Object.entries(elements)) replace(id, html)
  const chart = pointed && document.getElementById(pointed.id)
  if (chart) showValue(chart, pointed.x)
  if (sentences.length) news.textContent = sentences.join(". ")
  const headline = document.querySelector("#summary h1")
  if (headline) document.title = `${headline.textContent} – Hubring`
}

function setLive(state, words) {
  document.body.dataset.live = state
  if (live.textContent !== words) live.textContent = words
}

function clock() {
  return new Date().toLocaleTimeString()
}

const RETRY_MS = 3000
const PATIENCE = 5 // seconds; a live server sends its uptime every second

function watch() {
  const events = new EventSource("/events")
  let heard = Date.now()
  const alive = () => {
    heard = Date.now()
    setLive("yes", "Live")
  }
  events.onopen = alive
  events.onmessage = message => {
    alive()
    show(message)
  }
  // The browser reports no error if the network is down or the server is stopped.
  const watchdog = setInterval(() => {
    const silent = Math.round((Date.now() - heard) / 1000)
    if (silent < PATIENCE || document.body.dataset.live !== "yes") return
    setLive("no", `${clock()}: no data from the server for ${silent} s. The server is stopped, or the network is down. This page is out of date.`)
  }, 1000)
  events.onerror = () => {
    if (events.readyState === EventSource.CLOSED) { // not a stream, for example from a proxy: the browser does not retry
      clearInterval(watchdog)
      setTimeout(watch, RETRY_MS)
    }
    if (document.body.dataset.live !== "no") setLive("no", `${clock()}: no connection to the server. This page is out of date; reconnecting.`)
  }
  events.addEventListener("end", () => {
    events.close()
    clearInterval(watchdog)
    setLive("no", `${clock()}: the server has stopped. This page shows its last state.`)
  })
}

async function act(event) {
  event.preventDefault()
  const button = event.submitter
  if (button.dataset.sure && !confirm(button.dataset.sure)) return
  answer.className = ""
  answer.textContent = "Sending …"
  try {
    const reply = await fetch(button.formAction, {
      method: "POST",
      headers: { Authorization: `Bearer ${token.value.trim()}` },
    })
    answer.className = reply.ok ? "done" : "refused"
    answer.textContent = await reply.text()
  } catch (error) {
    answer.className = "refused"
    answer.textContent = `The server does not answer (${error.message}).`
  }
}

if (form) {
  takeToken()
  form.hidden = false
  form.addEventListener("submit", act)
  addEventListener("hashchange", takeToken)
}
if (live) {
  addEventListener("pointermove", point)
  addEventListener("pointerdown", point)
  watch()
}
