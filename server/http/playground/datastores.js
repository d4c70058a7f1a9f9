// The tab of the datastores: their figures, and what is added, searched for and deleted.

import { call, ended, forget, pathOf, upload } from "./api.js";
import { announce, button, byId, bytes, confirmed, el, figure, onControlEnter, percent, plural, showError } from "./dom.js";

const FOUND = 8;

/** @param {import("./main.js").App} app */
export function setUpDatastores(app) {
  const cards = new Map();
  // A file that misses the place for it would replace the page.
  for (const name of ["dragover", "drop"]) addEventListener(name, (event) => event.preventDefault());
  app.onStores.push((stores) => {
    for (const store of stores) {
      if (!cards.has(store.name)) cards.set(store.name, new StoreCard(store.name, app));
      cards.get(store.name).show(store);
    }
    const list = byId("store-list");
    const elements = stores.map((store) => cards.get(store.name).element);
    // A card that is put in its place again loses the focus, and the keys of whoever writes there.
    if (list.children.length !== elements.length || elements.some((element, place) => element !== list.children[place])) {
      list.replaceChildren(...elements);
    }
    byId("store-none").hidden = stores.length > 0;
  });
}

/** One datastore. */
class StoreCard {
  constructor(name, app) {
    this.name = name;
    this.app = app;
    this.figures = el("dl", { class: "figures" });
    this.work = el("div", { class: "work", role: "status" });
    this.notice = el("div", {});
    this.found = el("div", { class: "found" });
    this.size = el("span", { class: "figure" });
    this.element = el(
      "section",
      { class: "store", "aria-label": `Datastore ${name}` },
      el("h2", {}, el("span", { class: "name" }, name), this.size),
      this.figures,
      this.notice,
      this.work,
      el("div", { class: "tools" }, this.#files(), this.#remember(), this.#search()),
    );
  }

  /** @param {any} store */
  show(store) {
    this.size.textContent = `${plural(store.num_documents, "document")}, ${figure(store.num_entries)} entries`;
    const rows = {
      index: store.index || "–",
      recall: figure(store.recall, 3),
      "loss of the index": store.nats_change === null ? "–" : `${store.nats_change.toFixed(4)} nats`,
      "on disk": bytes(store.num_entries * store.bytes_per_entry),
      "bytes an entry": figure(store.bytes_per_entry, 0),
      width: figure(store.dim),
      "deleted documents": figure(store.num_deleted_documents),
      k: figure(store.k),
      λ: store.lam_adapts ? "adapts" : figure(store.lam),
      temperature: figure(store.knn_temperature, 3),
      "tuned on": store.tuned_on ?? "nothing",
      commit: figure(store.manifest),
    };
    this.figures.replaceChildren(...Object.entries(rows).map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
    if (store.problem) showError(this.notice, store.problem);
  }

  #files() {
    const input = el("input", { type: "file", multiple: true, class: "unseen", id: `files-${this.name}`, onchange: () => this.#upload([...input.files]) });
    const zone = el(
      "div",
      { class: "drop" },
      input,
      el("label", { for: input.id }, "Add files"),
      el("span", { class: "hint" }, "or drop them here: text, or .jsonl with one document a line"),
    );
    const over = (isOver) => (event) => {
      event.preventDefault();
      zone.classList.toggle("is-over", isOver);
    };
    zone.addEventListener("dragover", over(true));
    zone.addEventListener("dragleave", over(false));
    zone.addEventListener("drop", (event) => {
      over(false)(event);
      this.#upload([...event.dataTransfer.files]);
    });
    return zone;
  }

  #remember() {
    const text = el("textarea", { rows: "2", placeholder: "A text to remember", "aria-label": `Text to remember in ${this.name}` });
    const title = el("input", { placeholder: "Title (optional)", "aria-label": "Its title" });
    const send = async (event) => {
      event.preventDefault();
      if (!text.value.trim()) return;
      const body = { text: text.value, ...(title.value ? { title: title.value } : {}) };
      const remembered = await this.#add(async () => {
        await call("POST", pathOf(this.name, "/remember"), body);
        return (await call("GET", pathOf(this.name))).num_documents;
      });
      if (remembered) text.value = title.value = "";
    };
    const form = el("form", { class: "remember", onsubmit: send }, text, el("div", { class: "line" }, title, el("button", {}, "Remember")));
    onControlEnter(text, () => form.requestSubmit());
    return form;
  }

  #search() {
    const text = el("input", { type: "search", placeholder: "Words to find", "aria-label": `Words to find in ${this.name}` });
    const send = async (event) => {
      event.preventDefault();
      showError(this.notice);
      try {
        const answer = await call("POST", pathOf(this.name, "/search"), { text: text.value, by: "words", k: FOUND });
        this.#showFound(answer.data, text.value);
      } catch (error) {
        showError(this.notice, error);
      }
    };
    return el("form", { class: "search", role: "search", onsubmit: send }, el("div", { class: "line" }, text, el("button", {}, "Find")), this.found);
  }

  #showFound(places, words) {
    const summary = places.length ? `${plural(places.length, "place")} with “${words}”` : `These words follow each other nowhere in ${this.name}.`;
    announce(summary);
    this.found.replaceChildren(
      el("p", { class: "hint" }, summary),
      ...[...Map.groupBy(places, (place) => place.document_id).values()].map((group) => this.#document(group)),
    );
  }

  /** A document with its places. */
  #document(places) {
    const name = places[0].title || places[0].document_id;
    const forgetIt = button("Forget…", () => this.#forget(places[0]), { class: "danger", "aria-label": `Forget ${name}` });
    return el(
      "article",
      { class: "source" },
      el("h3", {}, el("span", { class: "name" }, name), forgetIt),
      ...places.map((place) => el("blockquote", {}, el("p", {}, "… ", place.snippet, " …"), el("footer", {}, `line ${figure(place.line)}`))),
    );
  }

  async #forget(place) {
    const name = place.title || place.document_id;
    if (!(await confirmed(`Delete “${name}” from the datastore “${this.name}” for good?`, "Delete it"))) return;
    showError(this.notice);
    try {
      await forget(this.name, place.document_id);
      this.found.replaceChildren();
      this.work.textContent = `${name} is deleted. Nothing will be generated from it again.`;
      await this.app.refreshStores();
    } catch (error) {
      showError(this.notice, error);
    }
  }

  async #upload(files) {
    if (!files.length) return;
    await this.#add(async () => {
      const begun = await upload(pathOf(this.name, "/documents"), files, (share) => this.#progress("sending", share));
      const operation = await ended(begun, ({ phase, state, done, total }) => this.#progress(phase || state, total ? done / total : 0));
      return operation.report.num_documents;
    });
  }

  /** Makes a change that resolves to the number of documents, and shows it. @returns {Promise<boolean>} whether it succeeded */
  async #add(change) {
    showError(this.notice);
    this.#progress("sending", 0);
    try {
      this.work.textContent = `Added. ${plural(await change(), "document")} now.`;
      await this.app.refreshStores();
      return true;
    } catch (error) {
      this.work.replaceChildren();
      showError(this.notice, error);
      return false;
    }
  }

  #progress(phase, share) {
    const meter = el("progress", { max: "1", "aria-label": `Adding to ${this.name}` });
    meter.value = share;
    this.work.replaceChildren(meter, el("span", {}, ` ${phase} ${percent(share)}`));
  }
}
