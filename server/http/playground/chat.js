// The tab that holds a conversation.

import { byId, el } from "./dom.js";
import { Pane } from "./pane.js";
import { Settings } from "./settings.js";

/** @param {import("./main.js").App} app */
export function setUpChat(app) {
  const [form, message, send, anew, talk] = ["chat-form", "message", "send", "anew", "talk"].map(byId);
  /** @type {{role: string, content?: string, pane?: Pane}[]} */
  let turns = [];
  /** @type {Pane | null} */
  let shown = null;

  const current = () => turns.at(-1)?.pane;

  function show(pane) {
    shown = pane;
    app.sources.show(pane);
    app.sources.render();
  }

  async function ask(content) {
    turns.push({ role: "user", content });
    talk.append(el("p", { class: "said" }, el("span", { class: "unseen" }, "You: "), content));
    const messages = turns.map((turn) => ({ role: turn.role, content: turn.pane ? turn.pane.text : turn.content }));
    const pane = new Pane("Reply", { isChat: true });
    turns.push({ role: "assistant", pane });
    talk.append(pane.element);
    pane.addEventListener("change", () => app.sources.pane === pane && app.sources.refresh());
    pane.addEventListener("pin", () => show(pane));
    pane.addEventListener("end", () => (send.textContent = "Send"));
    show(pane);
    send.textContent = "Stop";
    anew.hidden = false;
    const room = byId("max-tokens").value ? { max_completion_tokens: app.settings.maxTokens } : {};
    await pane.run({ model: app.model.id, messages, ...room, ...Settings.logprobs(true), ...app.settings.read() });
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (current()?.isRunning) {
      current().stop();
      return;
    }
    const content = message.value.trim();
    if (!content) return;
    message.value = "";
    ask(content);
  });
  message.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!current()?.isRunning) form.requestSubmit();
    }
  });
  anew.addEventListener("click", () => {
    current()?.stop();
    turns = [];
    talk.replaceChildren();
    anew.hidden = true;
    show(null);
    message.focus();
  });

  return {
    /** The text that the side panel shows when the tab is opened. */
    get pane() {
      return shown;
    },
  };
}
