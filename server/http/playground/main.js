// Starts the page: tabs, the token, and what the server has.

import { call, events, hasToken, setToken } from "./api.js";
import { setUpAbout } from "./about.js";
import { hideCard } from "./card.js";
import { setUpChat } from "./chat.js";
import { setUpComplete } from "./complete.js";
import { setUpDatastores } from "./datastores.js";
import { byId, showError } from "./dom.js";
import { Settings } from "./settings.js";
import { SourcesPanel } from "./sources.js";
import { setUpTrace } from "./trace.js";

/**
 * @typedef {{model: any, stores: any[], version: string, canExclude: boolean, settings: Settings,
 *   sources: SourcesPanel, refreshStores: () => Promise<void>, onStores: ((stores: any[]) => void)[]}} App
 */

const STEPS = { ArrowRight: 1, ArrowLeft: -1 };
const BENCH = ["complete", "chat"]; // the tabs with settings and sources

/** @type {App} */
const app = { model: null, stores: [], version: "", canExclude: false, onStores: [] };

app.refreshStores = async () => {
  app.stores = (await call("GET", "/v1/datastores")).data;
  app.settings.setStores(app.stores);
  for (const listener of app.onStores) listener(app.stores);
};

app.settings = new Settings();
app.sources = new SourcesPanel(byId("sources"), app);
app.sources.render();
const benches = { complete: setUpComplete(app), chat: setUpChat(app) };
setUpTrace(app);
setUpDatastores(app);
setUpTabs();
setUpToken();
for (const scrolling of ["wheel", "touchmove"]) addEventListener(scrolling, hideCard, { passive: true });
load();

/** Asks the server what it has. */
async function load() {
  const notice = byId("notice");
  showError(notice);
  try {
    const description = await call("GET", "/openapi.json");
    app.version = description.info.version;
    const completion = description.paths["/v1/completions"].post.requestBody.content["application/json"].schema;
    app.canExclude = "exclude_documents" in completion.properties.memory.properties;
    app.model = (await call("GET", "/v1/models")).data[0];
    byId("model").textContent = app.model.id;
    await app.refreshStores();
    setUpAbout(app);
    byId("token-form").hidden = !hasToken();
    document.body.dataset.ready = "";
  } catch (error) {
    showError(notice, error);
    if (error.status !== 401) byId("again").hidden = false;
  }
}

function setUpTabs() {
  const tabs = [...document.querySelectorAll('[role="tab"]')];
  const open = (tab, { focus = false } = {}) => {
    const name = tab.dataset.tab;
    for (const each of tabs) {
      each.setAttribute("aria-selected", `${each === tab}`);
      each.tabIndex = each === tab ? 0 : -1;
      byId(`${each.dataset.tab}-panel`).hidden = each !== tab;
    }
    byId("bench").classList.toggle("is-plain", !BENCH.includes(name));
    for (const id of ["settings", "sources"]) byId(id).hidden = !BENCH.includes(name);
    if (name in benches) app.sources.show(benches[name].pane);
    history.replaceState(null, "", `#${name}`);
    if (focus) tab.focus();
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => open(tab));
    tab.addEventListener("keydown", (event) => {
      const step = STEPS[event.key];
      if (step) open(tabs.at((tabs.indexOf(tab) + step) % tabs.length), { focus: true });
    });
  }
  const asked = () => tabs.find((tab) => `#${tab.dataset.tab}` === location.hash);
  addEventListener("hashchange", () => asked() && open(asked()));
  open(asked() ?? tabs[0]);
}

function setUpToken() {
  const [form, token] = [byId("token-form"), byId("token")];
  events.addEventListener("token-wanted", () => {
    form.hidden = false;
    token.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setToken(token.value.trim());
    token.value = "";
    load();
  });
  byId("again").addEventListener("click", () => {
    byId("again").hidden = true;
    load();
  });
}
