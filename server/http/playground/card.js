// The card beside the token that is pointed at: λ, the three log-probabilities, the likeliest tokens.

import { byId, el, figure, percent } from "./dom.js";
import { shared } from "./generation.js";
import { nameOf, whereOf } from "./places.js";
import { originOf } from "./tokens.js";

const IMPOSSIBLE = -9999;
const GAP = 6;
const NAMED = 0.005; // passages of a smaller share are not named

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

/** Log-probabilities, and the likeliest tokens. */
function figuresOf(token) {
  const table = el(
    "table",
    {},
    el("thead", {}, el("tr", {}, el("th", {}, `λ ${token.lam.toFixed(2)}`), el("th", { scope: "col" }, "log p"), el("th", { scope: "col" }, "p"))),
    el("tbody", {}, row("mixture", token.logprob), row("model", token.lmLogprob), row("memory", token.knnLogprob)),
  );
  if (!token.top.length) return [table];
  const items = token.top.map((each) => el("li", {}, el("code", {}, visible(each.text)), el("span", {}, probability(Math.exp(each.logprob)))));
  return [table, el("p", { class: "card-heading" }, "Likeliest in the mixture"), el("ol", {}, ...items)];
}

/** The shares of passages, and of the model alone. */
function sharesOf(token, passages) {
  const rows = passages.filter((each) => each.share >= NAMED).map(({ passage, share }) => [`${nameOf(passage)}, ${whereOf(passage)}`, share]);
  const items = [...rows, ["the model alone", 1 - token.share]].map(([name, share]) => el("li", {}, el("span", { class: "name" }, name), el("span", {}, percent(share))));
  return [el("ol", {}, ...items)];
}

/** Shows the card at an element. @param {import("./generation.js").Token} token @param {HTMLElement} at @param {any[]} passages */
export function showCard(token, at, passages) {
  const card = byId("card");
  const meter = el("span", { class: "meter" });
  meter.style.setProperty("--share", token.share.toFixed(3));
  const passagesOfIt = shared([token], passages);
  card.replaceChildren(
    el("p", { class: "card-title" }, el("code", {}, visible(token.text)), el("span", {}, originOf(token))),
    meter,
    ...(passagesOfIt ? sharesOf(token, passagesOfIt) : figuresOf(token)),
  );
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
