// A text as tokens, each shaded by its share of memory. One stop of the Tab key: arrows walk along the tokens.

import { el, percent } from "./dom.js";

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** The name of a token that shows nothing. @param {string} text */
const nameOf = (text) => (text.includes("\n") ? "line end" : "space");

/** How much of a token is not the model's alone. @param {import("./generation.js").Token} token */
export const originOf = ({ share, shares }) => `${percent(share)} from ${shares.length ? "passages" : "memory"}`;

/** Dispatches `show` with the number of the token to describe, or null, and `pin` with the number of a chosen one. */
export class TokenView extends EventTarget {
  /** @type {number | null} */
  #shown = null;

  /** @param {string} label */
  constructor(label) {
    super();
    /** @type {import("./generation.js").Token[]} */
    this.tokens = [];
    this.element = el("div", { class: "tokens", role: "group", "aria-label": label });
    this.element.addEventListener("mousemove", (event) => {
      // A text that comes under a pointer that rests, as after a click on Send, is not asked about.
      if (event.movementX || event.movementY) this.#show(this.#numberOf(event));
    });
    this.element.addEventListener("mouseleave", () => this.#show(null));
    this.element.addEventListener("focusin", (event) => this.#show(this.#numberOf(event)));
    this.element.addEventListener("focusout", () => this.#show(null));
    this.element.addEventListener("click", (event) => this.#pin(event));
    this.element.addEventListener("keydown", (event) => this.#walk(event));
    /** @type {Map<number, HTMLElement>} */
    this.spans = new Map();
    this.pinned = null;
  }

  /** @param {import("./generation.js").Token[]} tokens */
  add(tokens) {
    const spans = [];
    for (const token of tokens) {
      const number = this.tokens.push(token) - 1;
      if (!token.text) continue; // part of a character
      const span = el("span", {
        class: "token",
        role: "button",
        tabindex: this.spans.size ? "-1" : "0",
        "aria-pressed": "false",
        "aria-label": token.text.trim() ? null : nameOf(token.text),
        data: { number },
      });
      span.style.setProperty("--share", token.share.toFixed(3));
      span.textContent = token.text;
      this.spans.set(number, span);
      spans.push(span);
    }
    this.element.append(...spans);
  }

  clear() {
    this.tokens = [];
    this.spans.clear();
    this.pinned = this.#shown = null;
    this.element.replaceChildren();
  }

  /** Marks tokens with a class, and no others. @param {string} name @param {Set<number>} numbers */
  mark(name, numbers) {
    for (const [number, span] of this.spans) span.classList.toggle(name, numbers.has(number));
  }

  /** @param {number | null} number */
  pin(number) {
    this.pinned = number;
    for (const [each, span] of this.spans) span.setAttribute("aria-pressed", `${each === number}`);
  }

  /** @param {number} number */
  focus(number) {
    for (const span of this.spans.values()) span.tabIndex = -1;
    const span = this.spans.get(number);
    if (span) {
      span.tabIndex = 0;
      span.focus();
    }
  }

  /** A sentence about a token. @param {number} number */
  describe(number) {
    const token = this.tokens[number];
    return `${token.text.trim() || nameOf(token.text)}: ${originOf(token)}`;
  }

  #send(type, number) {
    this.dispatchEvent(new CustomEvent(type, { detail: number }));
  }

  #numberOf(event) {
    const span = event.target.closest?.(".token");
    return span ? Number(span.dataset.number) : null;
  }

  #show(number) {
    if (number === this.#shown) return;
    this.#shown = number;
    this.#send("show", number);
  }

  #pin(event) {
    const number = this.#numberOf(event);
    if (number === null || String(getSelection())) return; // text is being selected
    this.focus(number);
    this.#send("pin", number);
  }

  #walk(event) {
    const number = this.#numberOf(event);
    if (number === null) return;
    const numbers = [...this.spans.keys()];
    const place = numbers.indexOf(number);
    if (event.key in STEPS) this.focus(numbers[place + STEPS[event.key]] ?? number);
    else if (event.key === "Home") this.focus(numbers[0]);
    else if (event.key === "End") this.focus(numbers.at(-1));
    else if (event.key === "Enter" || event.key === " ") this.#send("pin", number);
    else if (event.key === "Escape") this.#show(null);
    else return;
    event.preventDefault();
  }
}
