// The tab that continues a text, and compares texts.

import { announce, byId, plural } from "./dom.js";
import { differences } from "./generation.js";
import { Pane } from "./pane.js";
import { ALONE, Settings } from "./settings.js";

/** @param {import("./main.js").App} app */
export function setUpComplete(app) {
  const [form, prompt, run, output] = ["complete-form", "prompt", "run", "output"].map(byId);
  /** @type {Pane[]} */
  let panes = [];

  function add(title, { hasTitle = false } = {}) {
    const pane = new Pane(title, { prompt: panes[0]?.prompt ?? prompt.value, hasTitle });
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

  /** Leaves the first text only, and puts another one beside it, whose tokens that differ are marked. */
  async function compare(title, changes) {
    const first = panes[0];
    for (const other of panes.splice(1)) other.element.remove();
    const { memory, ...others } = changes;
    const pane = add(title, { hasTitle: true });
    run.textContent = "Stop";
    await pane.run({ ...first.request, seed: first.seed, ...others, memory: { ...first.request.memory, ...memory } });
    showDifference(first, pane);
  }

  function showDifference(first, other) {
    const [left, right] = differences(first.tokens, other.tokens);
    first.view.mark("is-different", left);
    other.view.mark("is-different", right);
    const text = right.size || left.size ? `${plural(right.size, "token")} differ from “${first.title}”` : `the same text as “${first.title}”`;
    other.status.textContent += ` · ${text}`;
    announce(`${other.title}: ${text}`);
  }

  async function start() {
    for (const pane of panes) pane.element.remove();
    panes = [];
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
    const name = detail.title || detail.id;
    compare(`Without ${name}`, { memory: { exclude_documents: [detail.id] } });
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
