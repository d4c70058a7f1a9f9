// The card beside the token that is pointed at: λ, the three log-probabilities, the likeliest tokens.

import { byId, el, figure, percent } from "./dom.js";

const IMPOSSIBLE = -9999;
const GAP = 6;

/** A token's text with its white space visible. @param {string} text */
export const visible = (text) => text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replace(/^ | $/g, "␣");

const row = (name, logprob) => {
  const known = logprob !== null && logprob > IMPOSSIBLE;
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, name),
    el("td", {}, known ? logprob.toFixed(2) : "–"),
    el("td", {}, known ? probability(Math.exp(logprob)) : "0 %"),
  );
};

const probability = (p) => {
  if (p >= 0.0995 || p === 0) return percent(p);
  return p < 0.00001 ? "< 0.001 %" : `${figure(100 * p, p >= 0.001 ? 1 : 3)} %`;
};

/** Shows the card at an element. @param {import("./generation.js").Token} token @param {HTMLElement} at */
export function showCard(token, at) {
  const card = byId("card");
  const meter = el("span", { class: "meter" });
  meter.style.setProperty("--share", token.share.toFixed(3));
  card.replaceChildren(
    el("p", { class: "card-title" }, el("code", {}, visible(token.text)), el("span", {}, `${percent(token.share)} from memory`)),
    meter,
    el(
      "table",
      {},
      el("thead", {}, el("tr", {}, el("th", {}, `λ ${token.lam.toFixed(2)}`), el("th", { scope: "col" }, "log p"), el("th", { scope: "col" }, "p"))),
      el("tbody", {}, row("mixture", token.logprob), row("model", token.lmLogprob), row("memory", token.knnLogprob)),
    ),
  );
  if (token.top.length) {
    const items = token.top.map((each) =>
      el("li", {}, el("code", {}, visible(each.text)), el("span", {}, probability(Math.exp(each.logprob)))),
    );
    card.append(el("p", { class: "card-heading" }, "Likeliest in the mixture"), el("ol", {}, ...items));
  }
  card.hidden = false;
  place(card, at);
}

export function hideCard() {
  byId("card").hidden = true;
}

/** Puts the card below an element, or above where there is no room. Narrow screens have it at their end. */
function place(card, at) {
  const [target, box] = [at.getBoundingClientRect(), card.getBoundingClientRect()];
  const width = document.documentElement.clientWidth;
  const below = target.bottom + GAP;
  const fits = below + box.height <= innerHeight || target.top < box.height + GAP;
  card.style.left = `${Math.max(GAP, Math.min(target.left, width - box.width - GAP))}px`;
  card.style.top = `${fits ? below : target.top - box.height - GAP}px`;
}
