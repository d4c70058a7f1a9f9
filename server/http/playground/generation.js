// A generation: its request, and the tokens that come.

import { stream } from "./api.js";

/**
 * @typedef {{store: string, document_id: string, title: string, token_offset: number, line: number, token_id: number,
 *   token_text: string, weight: number, snippet: string}} Neighbor
 * @typedef {{id: number, text: string, lam: number, share: number, logprob: number, lmLogprob: number,
 *   knnLogprob: number | null, neighbors: Neighbor[], top: {text: string, logprob: number}[], shares: number[]}} Token
 */

/**
 * Yields what comes: tokens, then the reason of the end, then the usage. `isChat` says which of two calls a body is for
 * that has no question. Tokens of a mixture have the shares of its passages, and share is their sum.
 * @param {boolean} isChat @param {object} body @param {AbortSignal} signal
 * @returns {AsyncGenerator<{tokens: Token[], memory: any, reason: string | null, usage?: any}>}
 */
export async function* generate(isChat, body, signal) {
  const isAnswer = "question" in body;
  const asked = isAnswer ? body : { ...body, stream_options: { include_usage: true } };
  const path = isAnswer ? "/v1/answers" : isChat ? "/v1/chat/completions" : "/v1/completions";
  for await (const event of stream(path, asked, signal)) {
    if (event.usage) yield { tokens: [], memory: {}, reason: null, usage: event.usage };
    for (const choice of event.choices ?? [event]) {
      const memory = choice.memory ?? { tokens: [] };
      const tops = isChat ? chatTops(choice.logprobs) : completionTops(choice.logprobs);
      const tokens = memory.tokens.map((token, place) => ({
        id: token.id,
        text: token.text,
        lam: token.lam,
        share: token.memory_share + sum(token.passage_shares),
        shares: token.passage_shares,
        logprob: token.logprob,
        lmLogprob: token.lm_logprob,
        knnLogprob: token.knn_logprob,
        neighbors: token.neighbors,
        top: tops[place] ?? [],
      }));
      yield { tokens, memory, reason: choice.finish_reason };
    }
  }
}

const sum = (numbers) => numbers.reduce((total, each) => total + each, 0);
const sorted = (tops) => tops.sort((one, other) => other.logprob - one.logprob);

function completionTops(logprobs) {
  return (logprobs?.top_logprobs ?? []).map((top) =>
    sorted(Object.entries(top ?? {}).map(([text, logprob]) => ({ text, logprob }))),
  );
}

function chatTops(logprobs) {
  return (logprobs?.content ?? []).map((entry) =>
    sorted(entry.top_logprobs.map((top) => ({ text: top.token, logprob: top.logprob }))),
  );
}

/** The mean share of memory of some tokens. @param {Token[]} tokens */
export const meanShare = (tokens) => sum(tokens.map((token) => token.share)) / Math.max(1, tokens.length);

/**
 * The passages of a mixture with their mean shares in some tokens, the largest first; null where there are no shares.
 * @param {Token[]} tokens @param {any[]} passages
 */
export function shared(tokens, passages) {
  if (!tokens.length || !tokens[0].shares.length) return null;
  const meanOf = (number) => sum(tokens.map((token) => token.shares[number])) / tokens.length;
  return passages.map((passage, number) => ({ passage, share: meanOf(number) })).sort((one, other) => other.share - one.share);
}

/** The neighbors that have the token itself. @param {Token} token */
export const agreeing = (token) => token.neighbors.filter((neighbor) => neighbor.token_id === token.id);

export const keyOf = (neighbor) => JSON.stringify([neighbor.store, neighbor.document_id]);

/**
 * The documents that contributed to some tokens, most first. `share` is the probability that the document gave a token,
 * summed over the tokens, and `tokens` are the numbers of those to which it gave 1 % or more.
 * @param {Token[]} tokens
 */
export function documentsOf(tokens) {
  const found = new Map();
  tokens.forEach((token, number) => {
    const neighbors = agreeing(token);
    const total = neighbors.reduce((sum, neighbor) => sum + neighbor.weight, 0) || 1;
    const shares = new Map();
    for (const neighbor of neighbors) {
      const key = keyOf(neighbor);
      if (!found.has(key)) {
        const { store, document_id: id, title } = neighbor;
        found.set(key, { key, store, id, title, share: 0, tokens: new Set() });
      }
      shares.set(key, (shares.get(key) ?? 0) + (token.share * neighbor.weight) / total);
    }
    for (const [key, share] of shares) {
      found.get(key).share += share;
      if (share >= 0.01) found.get(key).tokens.add(number);
    }
  });
  return [...found.values()].sort((one, other) => other.share - one.share);
}

/**
 * The tokens of two texts that are not in their longest common subsequence.
 * @param {Token[]} ones @param {Token[]} others @returns {[Set<number>, Set<number>]}
 */
export function differences(ones, others) {
  let begin = 0;
  while (begin < Math.min(ones.length, others.length) && ones[begin].id === others[begin].id) begin += 1;
  const rows = ones.length - begin;
  const columns = others.length - begin;
  const length = Array.from({ length: rows + 1 }, () => new Uint16Array(columns + 1));
  for (let row = rows - 1; row >= 0; row -= 1) {
    for (let column = columns - 1; column >= 0; column -= 1) {
      length[row][column] =
        ones[begin + row].id === others[begin + column].id
          ? length[row + 1][column + 1] + 1
          : Math.max(length[row + 1][column], length[row][column + 1]);
    }
  }
  const left = new Set();
  const right = new Set();
  let [row, column] = [0, 0];
  while (row < rows || column < columns) {
    const isSame = row < rows && column < columns && ones[begin + row].id === others[begin + column].id;
    if (isSame) [row, column] = [row + 1, column + 1];
    else if (column === columns || (row < rows && length[row + 1][column] >= length[row][column + 1])) left.add(begin + row++);
    else right.add(begin + column++);
  }
  return [left, right];
}
