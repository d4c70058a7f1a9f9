// The tab about the model and the server.

import { byId, el, figure } from "./dom.js";

/** @param {import("./main.js").App} app */
export function setUpAbout(app) {
  const model = app.model.memory;
  const rows = {
    model: app.model.id,
    parameters: figure(model.num_parameters),
    context: `${figure(model.context_length)} tokens`,
    vocabulary: `${figure(model.vocab_size)} tokens`,
    "width and layers": `${figure(model.dim)}, ${figure(model.num_layers)}`,
    type: model.device ? `${model.dtype} on ${model.device}` : model.dtype,
    version: `memlm ${app.version}`,
  };
  byId("facts").replaceChildren(...Object.entries(rows).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}
