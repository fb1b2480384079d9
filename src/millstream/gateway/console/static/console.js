// What pages do beyond links and forms: local times, copying, live numbers, the live tail and searches that go on.
// Everything is readable without it. Message contents only ever arrive as escaped text from the server.
"use strict";
(() => {
  const clock = { month: "short", day: "numeric", hour: "numeric", minute: "2-digit", second: "2-digit" };
  const thisYear = new Intl.DateTimeFormat(undefined, clock);
  const anyYear = new Intl.DateTimeFormat(undefined, { ...clock, year: "numeric" });
  function localTimes(root) {
    for (const one of root.querySelectorAll("time[datetime]:not([title])")) {
      const at = new Date(one.dateTime);
      if (Number.isNaN(at.getTime())) continue;
      one.title = one.textContent;
      one.textContent = (at.getFullYear() === new Date().getFullYear() ? thisYear : anyYear).format(at);
    }
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    const source = document.getElementById(button.dataset.copy);
    try {
      await navigator.clipboard.writeText(source.textContent);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(source);
      button.textContent = "Press Ctrl+C";
    }
    setTimeout(() => { button.textContent = "Copy"; }, 2000);
  });

  document.addEventListener("keydown", (event) => {
    const inField = event.target.closest("input, textarea, select");
    if (event.key === "/" && !inField && !event.ctrlKey && !event.metaKey) {
      const field = document.querySelector("[data-search-field]");
      if (field) { event.preventDefault(); field.focus(); }
    }
  });

  // One event stream per browser: a visible tab holds it and notifies the others; hidden tabs hold none.
  const root = document.body.dataset.live;
  const channel = "BroadcastChannel" in window ? new BroadcastChannel("millstream-console") : null;
  let stream = null;
  let release = null;
  function refresh() {
    if (document.hidden) return;
    for (const one of document.querySelectorAll("[data-refresh]")) {
      if (!one.contains(document.activeElement) || document.activeElement === document.body) htmx.trigger(one, "refresh");
    }
  }
  function open() {
    if (stream) return;
    stream = new EventSource(root);
    stream.addEventListener("sampled", () => { if (channel) channel.postMessage("sampled"); refresh(); });
    stream.addEventListener("ended", () => { close(); location.reload(); });
  }
  function close() {
    if (stream) { stream.close(); stream = null; }
    if (release) { release(); release = null; }
  }
  let asked = null;
  function follow() {
    if (!root || document.hidden || !document.querySelector("[data-refresh]")) return;
    if (navigator.locks && channel) {
      asked = new AbortController();
      navigator.locks.request("millstream-console", { signal: asked.signal }, () => new Promise((done) => { release = done; open(); })).catch(() => {});
    } else {
      open();
    }
  }
  if (channel) channel.onmessage = refresh;
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) { if (asked && !release) asked.abort(); close(); } else { follow(); refresh(); }
  });
  window.addEventListener("pagehide", close);

  // Rows that a stream sends are rendered by the server, with everything in them escaped.
  function streamRows(box, url, { atTop, max }) {
    const body = document.querySelector(box.dataset.rows);
    const state = box.querySelector("[data-state]");
    const bar = box.querySelector("progress");
    const source = new EventSource(url);
    const end = (text) => { source.close(); box.dataset.running = ""; if (state && text) state.textContent = text; show(); };
    const show = () => {
      for (const one of box.querySelectorAll("[data-when]")) one.hidden = (one.dataset.when === "running") !== (box.dataset.running === "yes");
    };
    // After a stop, the next page continues where the stream was; after the end there is none.
    const next = document.querySelector("[data-continue]");
    const moveOn = (at) => {
      if (!next || at === undefined) return;
      const to = new URL(next.href);
      to.searchParams.set("at", at);
      next.href = to;
      next.hidden = at === "";
    };
    box.dataset.running = "yes";
    show();
    source.addEventListener("rows", (event) => {
      const said = JSON.parse(event.data);
      if (said.rows) {
        body.insertAdjacentHTML(atTop ? "afterbegin" : "beforeend", said.rows);
        localTimes(body);
        while (max && body.children.length > max) body.lastElementChild.remove();
        const none = document.querySelector("[data-none]");
        if (none) none.hidden = true;
      }
      if (state && said.state) state.textContent = said.state;
      if (bar && said.share !== undefined) bar.value = said.share;
      moveOn(said.at);
    });
    source.addEventListener("done", (event) => {
      const said = JSON.parse(event.data);
      end(said.state);
      moveOn(said.at);
    });
    source.addEventListener("ended", () => end("Your session has ended."));
    source.onerror = () => { if (source.readyState === EventSource.CLOSED || !atTop) end("The connection was lost."); };
    return () => end(atTop ? "Stopped." : `Stopped. ${state ? state.textContent : ""}`);
  }
  for (const box of document.querySelectorAll("[data-stream]")) {
    const atTop = box.dataset.mode === "tail";
    let stop = null;
    const start = () => { stop = streamRows(box, box.dataset.stream, { atTop, max: atTop ? 500 : 0 }); };
    box.hidden = false;
    box.addEventListener("click", (event) => {
      if (event.target.closest("[data-start]")) start();
      if (event.target.closest("[data-stop]") && stop) stop();
    });
    if (box.dataset.mode === "search") start();
    document.addEventListener("visibilitychange", () => { if (document.hidden && atTop && stop && box.dataset.running) stop(); });
  }

  // A form that is shown again comes from another address than its page, and only the page can be loaded again.
  const shown = document.querySelector("[data-address]");
  if (shown) history.replaceState(null, "", shown.dataset.address);

  // A log is read from its end.
  function prepare(root) {
    localTimes(root);
    for (const one of root.querySelectorAll("[data-end]")) one.scrollTop = one.scrollHeight;
  }
  // Where the navigation is a strip, the current page is in view.
  const current = document.querySelector("nav [aria-current]");
  if (current) current.parentElement.scrollIntoView({ block: "nearest", inline: "center" });
  document.addEventListener("htmx:afterSwap", (event) => prepare(event.target));
  document.addEventListener("htmx:oobAfterSwap", () => prepare(document));
  prepare(document);
  follow();
})();
