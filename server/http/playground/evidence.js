// Where a word of an answer stands in the passages that it was asked from.

import { el, percent, quoted } from "./dom.js";
import { nameOf, whereOf } from "./places.js";
import { opener } from "./reader.js";

const WORD = /[\p{L}\p{N}]+/gu;
// What ends a sentence: its sign, an empty line, or the line end before an item, a heading or a row.
const BORDER = /[.!?…]["'”’)\]]*\s+|\n\s*\n|\n(?=\s*[-*#|>\d])|\f/gu;
const SHOWN = 3; // sentences for one word
const NAMED = 0.05; // the least share with which a passage is shown, where shares are known
const QUOTED = 300; // characters of a sentence, which in a table or in code has no end

const wordsOf = (text) => [...text.matchAll(WORD)].map((match) => ({ word: match[0].toLowerCase(), begin: match.index, end: match.index + match[0].length }));

/** The longest run of equal words around one of `own` and any equal one of `theirs`; null where there is none. */
function longestRun(own, at, theirs) {
  let best = null;
  theirs.forEach((each, place) => {
    if (each.word !== own[at].word) return;
    let [before, after] = [0, 0];
    while (at > before && place > before && own[at - before - 1].word === theirs[place - before - 1].word) before += 1;
    while (own[at + after + 1] && own[at + after + 1].word === theirs[place + after + 1]?.word) after += 1;
    const length = 1 + before + after;
    if (!best || length > best.length) best = { length, at: each, begin: theirs[place - before].begin, end: theirs[place + after].end };
  });
  return best;
}

/** The begin and the end of the sentence around a place in a text. */
function sentenceAround(text, begin, end) {
  let first = 0;
  for (const match of text.matchAll(BORDER)) {
    const cut = match.index + match[0].length;
    if (cut <= begin) first = cut;
    else if (match.index >= end - 1) return [first, match.index + match[0].trimEnd().length];
  }
  return [first, text.length];
}

/** At most QUOTED characters of a sentence, with one of its words in their midst. */
function shortened([begin, end], word) {
  const from = Math.max(begin, word.begin - QUOTED / 2);
  return end - begin > QUOTED ? [from, Math.min(end, from + QUOTED)] : [begin, end];
}

/** Whether words that both have say anything: of a lone short word, as "the", nothing follows. */
const isTelling = (run, word) => run.length > 1 || word.length > 3 || /\p{N}/u.test(word);

/** The word of a text at the characters of one of its tokens, by its number among the words; -1 for a sign. */
function wordAt(tokens, number, words) {
  const begin = tokens.slice(0, number).reduce((sum, token) => sum + token.text.length, 0);
  const end = begin + tokens[number].text.length;
  return words.findIndex((word) => word.end > begin && word.begin < end);
}

/** A sentence of a passage, with the words that the answer has too marked. */
function quote(passage, share, run) {
  const [begin, end] = run ? shortened(sentenceAround(passage.text, run.at.begin, run.at.end), run.at) : [0, 0];
  const text = run ? passage.text.slice(begin, end) : passage.sentence.text;
  const inside = run && [Math.max(run.begin, begin) - begin, Math.min(run.end, end) - begin];
  const before = passage.text.slice(0, begin);
  const line = run ? passage.first_line + before.split("\n").length - 1 : passage.sentence.line;
  const page = passage.first_page && (run ? passage.first_page + before.split("\f").length - 1 : passage.sentence.page);
  const where = whereOf({ ...passage, first_line: line, last_line: line, first_page: page, last_page: page });
  const shown = inside ? [text.slice(0, inside[0]), el("strong", {}, text.slice(...inside)), text.slice(inside[1])] : [text];
  const footer = el("footer", {}, opener(passage, `${nameOf(passage)}, ${where}`, { text, line }), share === undefined ? null : ` gave ${percent(share)} of this word`);
  return el("blockquote", {}, el("p", {}, ...shown), footer);
}

/** The sentence that an answer stands on, and where a person finds it; null for an answer without one. */
export function sentenceOf(passage) {
  if (!passage.sentence) return null;
  const { text, line, page } = passage.sentence;
  const place = whereOf({ ...passage, first_line: line, last_line: line, first_page: page, last_page: page });
  const open = opener(passage, `${nameOf(passage)}, ${place}`, { text, line });
  return el("blockquote", { class: "sentence" }, el("p", {}, text), el("footer", {}, open));
}

/**
 * What a word of an answer stands on: the sentences of passages that have it, with those around it where both have
 * them, and the passages that gave it in other words.
 * @param {import("./generation.js").Token[]} tokens @param {number} number @param {any[]} passages
 * @returns {HTMLElement | null} null for a sign between words
 */
export function evidenceOf(tokens, number, passages) {
  const own = wordsOf(tokens.map((token) => token.text).join(""));
  const at = wordAt(tokens, number, own);
  if (at < 0 || !passages.length) return null;
  const { word } = own[at];
  const shares = tokens[number].shares;
  const found = passages.map((passage, place) => {
    const run = longestRun(own, at, wordsOf(passage.text));
    return { passage, share: shares[place], run: run && isTelling(run, word) ? run : null };
  });
  const telling = found
    .filter(({ passage, share, run }) => (share === undefined ? run : share >= NAMED && (run || passage.sentence)))
    .sort((one, other) => (other.share ?? 0) - (one.share ?? 0) || (other.run?.length ?? 0) - (one.run?.length ?? 0))
    .slice(0, SHOWN);
  const heading = headingOf(quoted(word), telling, shares.length > 0, percent(1 - tokens[number].share));
  return el("div", {}, el("h3", {}, heading), ...telling.map(({ passage, share, run }) => quote(passage, share, run)));
}

function headingOf(word, telling, hasShares, aloneShare) {
  if (telling.some(({ run }) => run)) return `${word} stands in`;
  if (telling.length) return `${word} came from these passages, which say it otherwise`;
  return hasShares ? `The model alone gave ${aloneShare} of ${word}` : `No passage has ${word} beside the words that it has here`;
}
