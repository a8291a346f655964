"use strict"
// Puts what the server sends into the page that it has made. Everything else the page is without this.

const live = document.getElementById("live")
const news = document.getElementById("news")
const form = document.getElementById("actions")
const token = document.getElementById("token")
const answer = document.getElementById("answer")

// The token comes behind the address's #, which no browser sends; it is taken out of sight at once.
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

// What a reader has done to an element that is about to be replaced: where the focus is, what is open or scrolled.
function remember(old) {
  const kept = { focus: null, scrolled: [], open: [] }
  if (document.activeElement.id && old.contains(document.activeElement)) kept.focus = document.activeElement.id
  for (const box of old.querySelectorAll(".scroll[id]")) kept.scrolled.push([box.id, box.scrollLeft, box.scrollTop])
  for (const each of old.querySelectorAll("details[id][open]")) kept.open.push(each.id)
  return kept
}

function restore(kept) {
  for (const id of kept.open) document.getElementById(id)?.setAttribute("open", "")
  for (const [id, left, top] of kept.scrolled) document.getElementById(id)?.scrollTo(left, top)
  if (kept.focus) document.getElementById(kept.focus)?.focus({ preventScroll: true })
}

function replace(id, html) {
  const old = document.getElementById(id)
  if (!old) return
  const fresh = made(html, old)
  if (old.isEqualNode(fresh)) return
  const kept = remember(old)
  old.replaceWith(fresh)
  restore(kept)
}

function show(message) {
  const { elements, news: sentences } = JSON.parse(message.data)
  for (const [id, html] of Object.entries(elements)) replace(id, html)
  if (sentences.length) news.textContent = sentences.join(". ")
  const headline = document.querySelector("#summary h1")
  if (headline) document.title = `${headline.textContent} – Hubring`
}

function say(state, words) {
  document.body.dataset.live = state
  if (live.textContent !== words) live.textContent = words
}

function clock() {
  return new Date().toLocaleTimeString()
}

const AGAIN = 3000 // milliseconds
const PATIENCE = 5 // seconds; while the server lives, its time up changes every second

function watch() {
  const events = new EventSource("/events")
  let heard = Date.now()
  const alive = () => {
    heard = Date.now()
    say("yes", "Live")
  }
  events.onopen = alive
  events.onmessage = message => {
    alive()
    show(message)
  }
  // A line that is cut, or a server that is stopped, is no error to the browser.
  const watchdog = setInterval(() => {
    const silent = Math.round((Date.now() - heard) / 1000)
    if (silent < PATIENCE || document.body.dataset.live !== "yes") return
    say("no", `${clock()}: the server has said nothing for ${silent} s. It was stopped, or the network is cut. What you see is old.`)
  }, 1000)
  events.onerror = () => {
    if (events.readyState === EventSource.CLOSED) { // an answer that is no stream, from a proxy say: the browser gives up
      clearInterval(watchdog)
      setTimeout(watch, AGAIN)
    }
    if (document.body.dataset.live !== "no") say("no", `${clock()}: no connection to the server. What you see is old; trying again.`)
  }
  events.addEventListener("end", () => {
    events.close()
    clearInterval(watchdog)
    say("no", `${clock()}: the server has ended. This is the last that it told.`)
  })
}

async function act(event) {
  event.preventDefault()
  const button = event.submitter
  if (button.dataset.sure && !confirm(button.dataset.sure)) return
  answer.className = ""
  answer.textContent = "Asking …"
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
if (live) watch()
