// Elements, made without HTML: what a document or a model says is only ever set as text.

/**
 * Makes an element. `on...` properties are listeners, `data` is its dataset, and all others are attributes, left out
 * where null or false.
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Node | string | null | undefined)} children
 * @returns {HTMLElement}
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "value" || name === "checked") element[name] = value;
    else if (value !== null && value !== undefined && value !== false) {
      element.setAttribute(name, value === true ? "" : value);
    }
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** The element of the page with an id. @param {string} id @returns {any} */
export const byId = (id) => document.getElementById(id);

/** A button. @param {string} label @param {(event: Event) => void} onclick @param {Record<string, any>} [properties] */
export const button = (label, onclick, properties = {}) => el("button", { type: "button", onclick, ...properties }, label);

/** Does something when a field of several lines gets Ctrl+Enter. @param {HTMLElement} field @param {() => void} action */
export function onControlEnter(field, action) {
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) action();
  });
}

/** A share as whole percent. @param {number} share */
export const percent = (share) => `${Math.round(100 * share)} %`;

/** A figure with at most some digits behind the point. @param {number | null} value */
export const figure = (value, digits = 2) =>
  value === null || value === undefined ? "–" : value.toLocaleString("en", { maximumFractionDigits: digits });

/** A size. @param {number} value */
export function bytes(value) {
  const power = Math.min(3, Math.max(0, Math.floor(Math.log10(Math.max(1, value)) / 3)));
  return `${figure(value / 1000 ** power, 1)} ${["B", "kB", "MB", "GB"][power]}`;
}

/** "1 token", "2 tokens". @param {number} count @param {string} noun */
export const plural = (count, noun) => `${figure(count)} ${noun}${count === 1 ? "" : "s"}`;

/** Says something to screen readers once they are idle. @param {string} text */
export function announce(text) {
  byId("announcer").textContent = text;
}

/**
 * Asks whether to do something that cannot be undone.
 * @param {string} question @param {string} action what the button says
 * @returns {Promise<boolean>}
 */
export function confirmed(question, action) {
  const dialog = byId("confirmation");
  byId("confirmation-question").textContent = question;
  byId("confirmation-action").textContent = action;
  dialog.returnValue = "";
  byId("confirmation-action").onclick = () => dialog.close("yes");
  byId("confirmation-cancel").onclick = () => dialog.close();
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "yes"), { once: true });
  });
}

/** Shows an error in a place of its own, or clears it. @param {HTMLElement} place @param {unknown} [error] */
export function showError(place, error) {
  place.replaceChildren();
  if (error) place.append(el("p", { class: "error", role: "alert" }, error instanceof Error ? error.message : `${error}`));
}
