// The tab that continues a text, and compares texts.

import { announce, byId, plural } from "./dom.js";
import { differences } from "./generation.js";
import { Pane } from "./pane.js";
import { ALONE, Settings } from "./settings.js";

/** The glob that only a document's id matches. @param {string} id */
const escaped = (id) => id.replace(/[*?[]/g, "[$&]");

/** @param {import("./main.js").App} app */
export function setUpComplete(app) {
  const [form, prompt, run, output] = ["complete-form", "prompt", "run", "output"].map(byId);
  /** @type {Pane[]} */
  let panes = [];

  function add(title, { hasTitle = false } = {}) {
    const leave = () => {
      close(pane);
      run.focus();
    };
    const onClose = panes.length ? leave : null;
    const pane = new Pane(title, { prompt: panes[0]?.prompt ?? prompt.value, hasTitle, onClose });
    pane.prompt = panes[0]?.prompt ?? prompt.value;
    pane.addEventListener("change", () => app.sources.pane === pane && app.sources.refresh());
    pane.addEventListener("pin", () => {
      app.sources.show(pane);
      app.sources.render();
    });
    pane.addEventListener("end", () => (run.textContent = panes.some((each) => each.isRunning) ? "Stop" : "Complete"));
    panes.push(pane);
    output.append(pane.element);
    output.classList.toggle("is-comparison", panes.length > 1);
    return pane;
  }

  /** Goes back to the first text. */
  function close(pane) {
    pane.stop();
    pane.element.remove();
    panes = panes.filter((each) => each !== pane);
    output.classList.toggle("is-comparison", panes.length > 1);
    panes[0].view.mark("is-different", new Set());
    if (app.sources.pane === pane) app.sources.show(panes[0]);
  }

  /** Puts another text beside the first one, in place of an earlier one, and marks the tokens that differ. */
  async function compare(title, memory) {
    const first = panes[0];
    panes.slice(1).forEach(close);
    const pane = add(title, { hasTitle: true });
    pane.request = { ...first.request, seed: first.seed, memory: { ...first.request.memory, ...memory } };
    run.textContent = "Stop";
    pane.element.scrollIntoView({ block: "nearest" });
    await Promise.all([first.running, pane.run(pane.request)]);
    if (panes.includes(pane)) showDifference(first, pane);
  }

  function showDifference(first, other) {
    const [left, right] = differences(first.tokens, other.tokens);
    first.view.mark("is-different", left);
    other.view.mark("is-different", right);
    const count = Math.max(left.size, right.size);
    const text = count ? `${plural(count, "token")} unlike “${first.title}”` : `the same text as “${first.title}”`;
    other.status.textContent += ` · ${text}`;
    announce(`${other.title}: ${text}`);
  }

  async function start() {
    for (const pane of panes) pane.element.remove();
    panes = [];
    output.classList.remove("is-comparison");
    const isSideBySide = app.settings.isSideBySide;
    const body = { model: app.model.id, prompt: prompt.value, max_tokens: app.settings.maxTokens, ...Settings.logprobs(false), ...app.settings.read() };
    if (isSideBySide) body.seed ??= Math.floor(Math.random() * 2 ** 31);
    const first = add(isSideBySide ? "With memory" : "Completion", { hasTitle: isSideBySide });
    first.request = body;
    app.sources.show(first);
    run.textContent = "Stop";
    if (!isSideBySide) return first.run(body);
    const alone = add("The model alone", { hasTitle: true });
    await Promise.all([first.run(body), alone.run({ ...body, memory: ALONE })]);
    return showDifference(first, alone);
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (panes.some((each) => each.isRunning)) panes.forEach((each) => each.stop());
    else start();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  app.sources.addEventListener("without", ({ detail }) => {
    const pane = app.sources.pane;
    const excluded = [...(pane.excluded ?? []), detail];
    const names = excluded.map((each) => each.title || each.id).join(" and ");
    compare(`Without ${names}`, { exclude_documents: excluded.map((each) => escaped(each.id)) });
    panes.at(-1).excluded = excluded;
  });
  app.sources.addEventListener("forgotten", ({ detail }) => {
    if (panes.length && app.sources.pane === panes[0]) compare(`After forgetting ${detail.title || detail.id}`, {});
  });

  return {
    /** The text that the side panel shows when the tab is opened. */
    get pane() {
      return panes[0] ?? null;
    },
  };
}
