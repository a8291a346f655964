"use strict"
// Signs in with the token in the URL's fragment, which browsers do not send, or with the last token of this tab.

const given = new URLSearchParams(location.hash.slice(1)).get("token")

async function signIn(token) {
  const reply = await fetch("/sign-in", { method: "POST", headers: { Authorization: `Bearer ${token}` } })
  if (!reply.ok) {
    sessionStorage.removeItem("token")
    return
  }
  sessionStorage.setItem("token", token)
  history.replaceState(null, "", location.pathname + location.search)
  location.reload()
}

const token_of_tab = given || sessionStorage.getItem("token")
if (token_of_tab) signIn(token_of_tab)
addEventListener("hashchange", () => location.reload())
