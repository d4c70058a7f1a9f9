// The tab that answers questions from the documents, and holds the conversation that follows.

import { Comparison, followSources } from "./comparison.js";
import { byId, el } from "./dom.js";

/** @param {import("./main.js").App} app */
export function setUpAsk(app) {
  const [form, message, send, anew, talk] = ["ask-form", "message", "send", "anew", "talk"].map(byId);
  /** @type {{role: string, content?: string, reply?: Comparison}[]} */
  let turns = [];

  const replies = () => turns.map((turn) => turn.reply).filter(Boolean);
  const isRunning = () => replies().some((each) => each.isRunning);

  /** The text of a turn: of a reply the first one, whatever stands beside it. */
  const textOf = (turn) => (turn.reply ? turn.reply.panes[0].text : turn.content);

  /** The request of the last turn. Only a first question loses nothing where each passage is read by itself. */
  function requestOf(content) {
    if (turns.length === 1 && app.settings.isMixture) return { question: content, ...app.settings.ofMixture };
    return { messages: turns.map((turn) => ({ role: turn.role, content: textOf(turn) })), ...app.settings.ofChat };
  }

  async function ask(content) {
    turns.push({ role: "user", content });
    talk.append(el("p", { class: "said" }, el("span", { class: "unseen" }, "You: "), content));
    const body = { model: app.model.id, ...requestOf(content) };
    const reply = new Comparison(app, el("div"), true);
    reply.addEventListener("run", showState);
    reply.addEventListener("close", () => message.focus());
    turns.push({ role: "assistant", reply });
    talk.append(reply.element);
    const pane = reply.add("Answer");
    app.sources.show(pane);
    await reply.run(pane, body);
  }

  function stop() {
    for (const reply of replies()) reply.stop();
  }

  function showState() {
    send.textContent = isRunning() ? "Stop" : "Ask";
    anew.hidden = !turns.length;
    message.placeholder = turns.length ? "Ask on: the conversation so far is read too." : "Ask your documents, or anything.";
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
    showState();
    app.sources.show(null);
    message.focus();
  });
  app.onStores.push((stores) => {
    const usable = stores.filter((each) => !each.problem);
    const count = usable.reduce((sum, each) => sum + each.num_documents, 0);
    byId("ask-empty").hidden = count > 0;
  });
  followSources(app, replies);

  return {
    /** The text that the side panel shows when the tab is opened. */
    get pane() {
      return replies().at(-1)?.panes[0] ?? null;
    },
  };
}
