// The strip under a text: the share of memory as an area and λ as a line, from the first token to the last.

import { el, figure, percent } from "./dom.js";
import { meanShare } from "./generation.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 100;

const shape = (tag, name) => {
  const element = document.createElementNS(SVG, tag);
  element.setAttribute("class", name);
  return element;
};

/** Dispatches `show` and `pin` as a TokenView does. */
export class StripChart extends EventTarget {
  constructor() {
    super();
    this.svg = shape("svg", "strip");
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    [this.area, this.marks, this.line, this.cursor] = [
      shape("path", "strip-share"),
      shape("path", "strip-marks"),
      shape("path", "strip-lam"),
      shape("rect", "strip-cursor"),
    ];
    this.svg.append(this.area, this.marks, this.line, this.cursor);
    this.element = el(
      "figure",
      { class: "chart", hidden: true },
      el("div", { class: "chart-plot" }, el("span", { class: "chart-scale", "aria-hidden": "true" }, el("span", {}, "100 %"), el("span", {}, "0")), this.svg),
      el(
        "figcaption",
        { "aria-hidden": "true" },
        el("span", { class: "key-share" }, "share of memory"),
        el("span", { class: "key-lam" }, "λ"),
        el("span", { class: "chart-ends" }, "token by token"),
      ),
    );
    this.count = 0;
    this.svg.addEventListener("pointermove", (event) => this.#send("show", event));
    this.svg.addEventListener("pointerleave", () => this.dispatchEvent(new CustomEvent("show", { detail: null })));
    this.svg.addEventListener("click", (event) => this.#send("pin", event));
    this.point(null);
  }

  /** @param {import("./generation.js").Token[]} tokens */
  draw(tokens) {
    this.count = tokens.length;
    this.element.hidden = !tokens.length;
    this.svg.setAttribute("viewBox", `0 0 ${tokens.length || 1} ${HEIGHT}`);
    const steps = tokens.map((token, x) => `V${(HEIGHT * (1 - token.share)).toFixed(1)}H${x + 1}`);
    this.area.setAttribute("d", `M0 ${HEIGHT}${steps.join("")}V${HEIGHT}Z`);
    const levels = tokens.map((token, x) => `${x ? "V" : "M0 "}${(HEIGHT * (1 - token.lam)).toFixed(1)}H${x + 1}`);
    this.line.setAttribute("d", levels.join(""));
    const lam = tokens.reduce((sum, token) => sum + token.lam, 0) / Math.max(1, tokens.length);
    this.svg.setAttribute(
      "aria-label",
      `Strip chart of ${tokens.length} tokens: on average ${percent(meanShare(tokens))} from memory, and λ ${figure(lam)}`,
    );
  }

  /** Marks tokens at the foot of the strip. @param {Set<number>} numbers */
  mark(numbers) {
    this.marks.setAttribute("d", [...numbers].map((x) => `M${x} ${HEIGHT}h1v-7h-1z`).join(""));
  }

  /** Points at a token, or at none. @param {number | null} number */
  point(number) {
    this.cursor.setAttribute("visibility", number === null ? "hidden" : "visible");
    if (number === null) return;
    for (const [name, value] of Object.entries({ x: number, y: 0, width: 1, height: HEIGHT })) {
      this.cursor.setAttribute(name, `${value}`);
    }
  }

  #send(type, event) {
    const box = this.svg.getBoundingClientRect();
    const number = Math.floor(((event.clientX - box.left) / box.width) * this.count);
    if (number >= 0 && number < this.count) this.dispatchEvent(new CustomEvent(type, { detail: number }));
  }
}
