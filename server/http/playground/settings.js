// The settings that Complete and Chat share.

import { byId, el, figure } from "./dom.js";

const NEIGHBORS = 8;
const TOP_LOGPROBS = 5;
const MAX_TOKENS = 48; // of a text
const OF_A_CHAT = { max_completion_tokens: 512, temperature: 0.3 }; // as `memlm chat`

/** The object `memory` of the model alone. */
export const ALONE = { stores: [] };

export class Settings {
  constructor() {
    this.lam = byId("lam");
    this.isTuned = byId("lam-tuned");
    this.lam.addEventListener("input", () => {
      this.isTuned.checked = false;
      this.#showLam();
    });
    this.isTuned.addEventListener("change", () => this.#showLam());
    this.stores = [];
    this.#showLam();
    if (matchMedia("(max-width: 62rem)").matches) byId("settings").open = false;
  }

  /** Lists the datastores, and keeps what was chosen among them. @param {any[]} stores */
  setStores(stores) {
    const before = new Map(this.stores.map((each) => [each.name, each]));
    this.stores = stores.map((store) => {
      const isOn = el("input", { type: "checkbox", checked: before.get(store.name)?.isOn.checked ?? !store.problem, disabled: Boolean(store.problem) });
      const weight = el("input", { type: "number", min: "0.01", step: "any", value: before.get(store.name)?.weight.value ?? "1", "aria-label": `Weight of ${store.name}` });
      return { name: store.name, isOn, weight, size: store.num_documents };
    });
    const isOne = this.stores.length < 2;
    byId("stores").replaceChildren(
      ...this.stores.map(({ name, isOn, weight, size }) =>
        el("li", {}, el("label", {}, isOn, el("span", { class: "name" }, name), el("span", { class: "hint" }, figure(size))), isOne ? null : weight),
      ),
    );
    byId("no-stores").hidden = this.stores.length > 0;
  }

  get isSideBySide() {
    return byId("side-by-side").checked;
  }

  /** The parameters that the settings stand for. */
  read() {
    const chosen = this.stores.filter((each) => each.isOn.checked);
    const memory = { neighbors: NEIGHBORS, stores: Object.fromEntries(chosen.map((each) => [each.name, Number(each.weight.value) || 1])) };
    if (!this.isTuned.checked) memory.lam = Number(this.lam.value);
    const body = { memory: chosen.length ? memory : ALONE };
    if (!byId("drafts").checked) body.drafts = 0;
    for (const name of ["temperature", "seed"]) {
      if (byId(name).value !== "") body[name] = Number(byId(name).value);
    }
    return body;
  }

  /** The parameters of a text. */
  get ofText() {
    return { max_tokens: Number(byId("max-tokens").value) || MAX_TOKENS, ...Settings.logprobs(false), ...this.read() };
  }

  /** The parameters of a chat. */
  get ofChat() {
    const body = { ...OF_A_CHAT, ...Settings.logprobs(true), ...this.read() };
    if (byId("max-tokens").value) body.max_completion_tokens = Number(byId("max-tokens").value);
    if (!byId("passages").checked && body.memory !== ALONE) body.memory.passages = 0;
    return body;
  }

  /** Whether the chat reads each passage by itself. */
  get isMixture() {
    return byId("mixture").checked && byId("passages").checked && this.stores.some((each) => each.isOn.checked);
  }

  /** The parameters of an answer from a mixture over passages. */
  get ofMixture() {
    const { memory, drafts: _, ...body } = this.read();
    const max_tokens = Number(byId("max-tokens").value) || OF_A_CHAT.max_completion_tokens;
    return { temperature: OF_A_CHAT.temperature, max_tokens, ...body, mixture: true, memory: { stores: memory.stores } };
  }

  /** What asks for the likeliest tokens, in the words of the two calls. */
  static logprobs(isChat) {
    return isChat ? { logprobs: true, top_logprobs: TOP_LOGPROBS } : { logprobs: TOP_LOGPROBS };
  }

  #showLam() {
    const value = Number(this.lam.value);
    byId("lam-value").textContent = this.isTuned.checked ? "as tuned" : value ? value.toFixed(2) : "0: the model alone";
    this.lam.classList.toggle("is-off", this.isTuned.checked);
  }
}
