// The tab that holds a conversation.

import { Comparison, followSources } from "./comparison.js";
import { byId, el } from "./dom.js";

/** @param {import("./main.js").App} app */
export function setUpChat(app) {
  const [form, message, send, anew, talk] = ["chat-form", "message", "send", "anew", "talk"].map(byId);
  /** @type {{role: string, content?: string, reply?: Comparison}[]} */
  let turns = [];

  const replies = () => turns.map((turn) => turn.reply).filter(Boolean);
  const isRunning = () => replies().some((each) => each.isRunning);

  /** The text of a turn: of a reply the first one, whatever stands beside it. */
  const textOf = (turn) => (turn.reply ? turn.reply.panes[0].text : turn.content);

  async function ask(content) {
    turns.push({ role: "user", content });
    talk.append(el("p", { class: "said" }, el("span", { class: "unseen" }, "You: "), content));
    const messages = turns.map((turn) => ({ role: turn.role, content: textOf(turn) }));
    const reply = new Comparison(app, el("div"), true);
    reply.addEventListener("run", () => (send.textContent = isRunning() ? "Stop" : "Send"));
    reply.addEventListener("close", () => message.focus());
    turns.push({ role: "assistant", reply });
    talk.append(reply.element);
    const pane = reply.add("Reply");
    app.sources.show(pane);
    anew.hidden = false;
    const body = app.settings.isMixture ? { question: content, ...app.settings.ofMixture } : { messages, ...app.settings.ofChat };
    await reply.run(pane, { model: app.model.id, ...body });
  }

  function stop() {
    for (const reply of replies()) reply.stop();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (isRunning()) {
      stop();
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
      if (!isRunning()) form.requestSubmit();
    }
  });
  anew.addEventListener("click", () => {
    stop();
    turns = [];
    talk.replaceChildren();
    anew.hidden = true;
    app.sources.show(null);
    message.focus();
  });
  followSources(app, replies);

  return {
    /** The text that the side panel shows when the tab is opened. */
    get pane() {
      return replies().at(-1)?.panes[0] ?? null;
    },
  };
}
