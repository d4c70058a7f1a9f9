// The tab that continues a text, and compares texts.

import { Comparison, followSources } from "./comparison.js";
import { byId, onControlEnter } from "./dom.js";
import { ALONE } from "./settings.js";

/** @param {import("./main.js").App} app */
export function setUpComplete(app) {
  const [form, prompt, run, output] = ["complete-form", "prompt", "run", "output"].map(byId);
  const texts = new Comparison(app, output, false);
  texts.addEventListener("run", () => (run.textContent = texts.isRunning ? "Stop" : "Complete"));
  texts.addEventListener("close", () => run.focus());

  async function start() {
    texts.clear();
    const isSideBySide = app.settings.isSideBySide;
    const body = { model: app.model.id, prompt: prompt.value, ...app.settings.ofText };
    if (isSideBySide) body.seed ??= Math.floor(Math.random() * 2 ** 31);
    const first = texts.add(isSideBySide ? "With memory" : "Completion", { prompt: body.prompt, hasTitle: isSideBySide });
    app.sources.show(first);
    if (!isSideBySide) return texts.run(first, body);
    const alone = texts.add("The model alone", { prompt: body.prompt, hasTitle: true });
    await Promise.all([texts.run(first, body), texts.run(alone, { ...body, memory: ALONE })]);
    if (texts.panes[1] === alone) texts.showDifference();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (texts.isRunning) texts.stop();
    else start();
  });
  onControlEnter(prompt, () => form.requestSubmit());
  followSources(app, () => [texts]);

  return {
    /** The text that the side panel shows when the tab is opened. */
    get pane() {
      return texts.panes[0] ?? null;
    },
  };
}
