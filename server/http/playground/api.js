// Calls of the server's HTTP API, and their errors.

const TOKEN = "memlm-token"; // in sessionStorage: forgotten with the tab

/** A refusal, with the message that the server gave. */
export class ApiError extends Error {
  /** @param {{message: string, code?: string, param?: string | null}} error @param {number} status */
  constructor(error, status) {
    super(error.message);
    this.status = status;
    this.code = error.code;
  }
}

/** The server cannot be reached, or an answer broke off. */
export class LostConnection extends Error {
  constructor(message = "The server cannot be reached.") {
    super(message);
  }
}

/** Dispatches `token-wanted` for a request without a token that the server knows. */
export const events = new EventTarget();

export const hasToken = () => Boolean(sessionStorage.getItem(TOKEN));

/** @param {string} token empty to forget it */
export function setToken(token) {
  if (token) sessionStorage.setItem(TOKEN, token);
  else sessionStorage.removeItem(TOKEN);
}

/** @returns {Record<string, string>} */
function headers() {
  const token = sessionStorage.getItem(TOKEN);
  return token ? { Authorization: `Bearer ${token}` } : {};
}

/** @param {string} text @param {number} status */
function refusal(text, status) {
  let error = { message: `The server answered with status ${status}.` };
  try {
    error = JSON.parse(text).error ?? error;
  } catch {
    // not a body of the API, as from a proxy
  }
  if (status === 401) events.dispatchEvent(new Event("token-wanted"));
  return new ApiError(error, status);
}

/** @param {string} method @param {string} path @param {unknown} [body] @param {AbortSignal} [signal] */
async function request(method, path, body, signal) {
  const json = body === undefined ? {} : { "Content-Type": "application/json" };
  let answer;
  try {
    answer = await fetch(path, {
      method,
      headers: { ...headers(), ...json },
      body: body === undefined ? undefined : JSON.stringify(body),
      signal,
    });
  } catch (error) {
    throw error.name === "AbortError" ? error : new LostConnection();
  }
  if (!answer.ok) throw refusal(await answer.text(), answer.status);
  return answer;
}

/** Sends a request and returns the JSON of its answer. */
export async function call(method, path, body, signal) {
  const answer = await request(method, path, body, signal);
  try {
    return await answer.json();
  } catch (error) {
    throw error.name === "AbortError" ? error : new LostConnection();
  }
}

/**
 * Yields the events of a stream. Raises LostConnection where it ends before its end.
 * @param {string} path @param {object} body @param {AbortSignal} signal
 */
export async function* stream(path, body, signal) {
  const answer = await request("POST", path, { ...body, stream: true }, signal);
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new LostConnection("The connection was lost.");
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        if (part.startsWith(":")) continue; // sent while the request waits
        const data = part.replace(/^data: /, "");
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error, 500);
        yield event;
      }
    }
  } catch (error) {
    if (error instanceof TypeError) throw new LostConnection("The connection was lost.");
    throw error;
  } finally {
    reader.cancel().catch(() => {});
  }
}

/**
 * Sends files as a form. `progress` gets the share that has been sent.
 * @param {string} path @param {File[]} files @param {(share: number) => void} progress
 * @returns {Promise<any>}
 */
export function upload(path, files, progress) {
  const form = new FormData();
  for (const file of files) form.append("files", file, file.name);
  return new Promise((resolve, reject) => {
    const sending = new XMLHttpRequest(); // fetch does not report what it has sent
    sending.open("POST", path);
    for (const [name, value] of Object.entries(headers())) sending.setRequestHeader(name, value);
    sending.upload.onprogress = (event) => progress(event.loaded / event.total);
    sending.onerror = () => reject(new LostConnection());
    sending.onload = () => {
      if (sending.status < 300) resolve(JSON.parse(sending.responseText));
      else reject(refusal(sending.responseText, sending.status));
    };
    sending.send(form);
  });
}

/**
 * Waits for the end of an operation. Raises its error where it failed.
 * @param {any} operation @param {(operation: any) => void} progress
 */
export async function ended(operation, progress) {
  while (!operation.has_ended) {
    progress(operation);
    operation = await call("GET", `/v1/operations/${encodeURIComponent(operation.id)}?wait_s=1`);
  }
  if (operation.error) throw new ApiError(operation.error, 500);
  return operation;
}

/** The path of a datastore. @param {string} store */
export const pathOf = (store, rest = "") => `/v1/datastores/${encodeURIComponent(store)}${rest}`;

/** Deletes a document for good. @param {string} store @param {string} document */
export const forget = (store, document) =>
  call("POST", pathOf(store, "/documents/delete"), { document_ids: [document] });
