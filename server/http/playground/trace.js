// The tab that finds the passages of a text which stand word for word in documents.

import { call } from "./api.js";
import { announce, byId, el, figure, onControlEnter, percent, plural, showError } from "./dom.js";

/** @param {import("./main.js").App} app */
export function setUpTrace(app) {
  const [form, text, store, output, places] = ["trace-form", "trace-text", "trace-store", "trace-output", "trace-places"].map(byId);

  app.onStores.push((stores) => {
    const chosen = store.value;
    store.replaceChildren(el("option", { value: "" }, "all datastores"), ...stores.map((each) => el("option", { value: each.name }, each.name)));
    store.value = stores.some((each) => each.name === chosen) ? chosen : "";
  });

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    showError(byId("trace-notice"));
    output.setAttribute("aria-busy", "true");
    const body = { text: text.value, min_tokens: Number(byId("trace-least").value) || 6 };
    if (store.value) body.store = store.value;
    try {
      show(body.text, await call("POST", "/v1/trace", body));
    } catch (error) {
      showError(byId("trace-notice"), error);
    } finally {
      output.removeAttribute("aria-busy");
    }
  });

  onControlEnter(text, () => form.requestSubmit());

  function show(traced, trace) {
    const characters = Array.from(traced); // spans count characters, not halves of surrogate pairs
    const parts = [];
    let end = 0;
    for (const span of trace.spans) {
      parts.push(characters.slice(end, Math.max(end, span.begin)).join(""));
      const onkeydown = (event) => {
        if (event.key !== "Enter" && event.key !== " ") return;
        event.preventDefault();
        choose(mark, span);
      };
      // No button: those do not break between lines.
      const mark = el("span", { class: "span", role: "button", tabindex: "0", "aria-pressed": "false", onclick: () => choose(mark, span), onkeydown });
      mark.textContent = characters.slice(Math.max(end, span.begin), span.end).join("");
      parts.push(mark);
      end = Math.max(end, span.end);
    }
    parts.push(characters.slice(end).join(""));
    output.replaceChildren(...parts);
    places.replaceChildren();
    const share = trace.tokens ? trace.traced_tokens / trace.tokens : 0;
    const summary = trace.spans.length
      ? `${plural(trace.spans.length, "passage")} found · ${percent(share)} of ${plural(trace.tokens, "token")} stand in a document`
      : `No passage of this length stands in a document (${plural(trace.tokens, "token")} read).`;
    byId("trace-status").textContent = summary;
    announce(summary);
    output.querySelector(".span")?.click();
  }

  function choose(mark, span) {
    for (const each of output.querySelectorAll(".span")) each.setAttribute("aria-pressed", `${each === mark}`);
    const count = span.count >= 1000 ? "1,000 places or more" : plural(span.count, "place");
    places.replaceChildren(
      el("h2", {}, plural(span.places.length, "document")),
      el("p", { class: "hint" }, `${plural(span.tokens, "token")} · stands at ${count} · rarity ${figure(span.rarity, 0)} nats`),
      ...span.places.map((place) => article(place, span.text)),
    );
  }
}

function article(place, text) {
  const snippet = place.snippet;
  const begin = snippet.indexOf(text.trim());
  const size = text.trim().length;
  const marked = begin < 0 ? [snippet] : [snippet.slice(0, begin), el("strong", {}, text.trim()), snippet.slice(begin + size)];
  return el(
    "article",
    { class: "source" },
    el("h3", {}, el("span", { class: "name" }, place.title || place.document_id), el("span", { class: "figure" }, `line ${figure(place.line)}`)),
    el("blockquote", {}, el("p", {}, "… ", ...marked, " …"), el("footer", {}, place.store)),
  );
}
