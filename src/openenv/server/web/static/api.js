/**
 * Requests to the server: paths, bodies and errors. Knows HTTP; must not know what is shown.
 *
 * Paths are relative to the page's own address, so that the page works behind a proxy that adds a prefix.
 */

import { currentTheme } from "./theme.js";

const GET_TRIES = 3;
const RETRY_MS = 150;

/** A request that the server refused, or that did not reach it (`status` 0). */
export class ApiError extends Error {
  /**
   * @param {number} status
   * @param {any} body - The error's body: `detail`, `code`, and what belongs to the code.
   */
  constructor(status, body) {
    super(messageOf(status, body));
    this.name = "ApiError";
    this.status = status;
    this.code = typeof body?.code === "string" ? body.code : "";
    this.reason = typeof body?.reason === "string" ? body.reason : "";
    this.retryAfter = typeof body?.retry_after_s === "number" ? body.retry_after_s : null;
    /** @type {{loc: (string | number)[], msg: string}[]} */
    this.problems = problemsOf(body);
  }
}

/**
 * Resolve a path against the page's address.
 * @param {string} path
 */
export function address(path) {
  return new URL(path, document.baseURI);
}

/** The address that clients in Python connect to: the page's, without `web/`. */
export function serverAddress() {
  const url = address("../");
  return (url.origin + url.pathname).replace(/\/$/, "");
}

export const api = {
  page: () => request("GET", "page"),
  state: () => request("GET", "state"),
  sessions: () => request("GET", "sessions"),
  /** @param {string} id */
  watch: (id) => request("GET", `sessions/${encodeURIComponent(id)}/watch`),
  /** @param {number} limit */
  episodes: (limit) => request("GET", `episodes?limit=${limit}`),
  /** @param {string} id */
  episode: (id) => request("GET", `episodes/${encodeURIComponent(id)}`),
  /** @param {Record<string, any>} options */
  reset: (options) => request("POST", "reset", options),
  /** @param {Record<string, any>} body - `{action}` or `{message}`. */
  step: (body) => request("POST", "step", body),
  close: () => request("POST", "close", {}),
  cancel: () => request("POST", "cancel", {}),
  /** @param {string} name @param {Record<string, any>} args */
  call: (name, args) => request("POST", "call", { name, arguments: args }),
  /** @param {string} id */
  endSession: (id) => request("DELETE", `sessions/${encodeURIComponent(id)}`),
  /** @param {string} token */
  login: (token) => request("POST", "login", { token }),
  logout: () => request("POST", "logout", {}),
};

/** Stored and running rollouts; ids may be their beginnings. */
export const rolloutApi = {
  /** @param {URLSearchParams} query */
  list: (query) => request("GET", `rollouts?${query}`),
  /** @param {URLSearchParams} query */
  stats: (query) => request("GET", `rollouts/-/stats?${query}`),
  /** @param {URLSearchParams} query */
  names: (query) => request("GET", `rollouts/-/names?${query}`),
  /** @param {URLSearchParams} query */
  curve: (query) => request("GET", `rollouts/-/curve?${query}`),
  /** The address of a download. @param {URLSearchParams} query */
  exportAddress: (query) => address(`./rollouts/-/export?${query}`).href,
  /** @param {string} id @param {string} [part] - Such as `transcript`, or `tokens/3`. @param {URLSearchParams} [query] */
  one: (id, part = "", query = new URLSearchParams()) =>
    request("GET", `rollouts/${encodeURIComponent(id)}${part && `/${part}`}?${query}`),
  /** The address of a part of a rollout. @param {string} id @param {string} part @param {URLSearchParams} query */
  address: (id, part, query) => address(`./rollouts/${encodeURIComponent(id)}/${part}?${query}`).href,
};

/**
 * @param {string} method
 * @param {string} path
 * @param {any} [body]
 */
async function request(method, path, body) {
  /** @type {RequestInit} */
  const options = { method, credentials: "same-origin", headers: { Accept: "application/json" } };
  if (body !== undefined) {
    // The environment may draw its picture for light or dark.
    options.headers = { ...options.headers, "Content-Type": "application/json", "X-OpenEnv-Theme": currentTheme() };
    options.body = JSON.stringify(body);
  }
  const response = await send(address(`./${path}`), options, method === "GET" ? GET_TRIES : 1);
  const answer = await read(response);
  if (!response.ok) throw new ApiError(response.status, withRetry(answer, response));
  return answer;
}

/**
 * Send a request; one that changes nothing is sent again when the network fails, as it does when it changes.
 * @param {URL} url
 * @param {RequestInit} options
 * @param {number} tries
 * @returns {Promise<Response>}
 */
async function send(url, options, tries) {
  try {
    return await fetch(url, options);
  } catch {
    if (tries <= 1) throw new ApiError(0, { detail: "The server cannot be reached.", code: "UNREACHABLE" });
  }
  await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  return send(url, options, tries - 1);
}

/** @param {Response} response */
async function read(response) {
  const text = await response.text().catch(() => "");
  try {
    return text === "" ? null : JSON.parse(text);
  } catch {
    return { detail: text.slice(0, 2000) };
  }
}

/** @param {any} body @param {Response} response */
function withRetry(body, response) {
  const seconds = Number(response.headers.get("Retry-After"));
  return Number.isFinite(seconds) && seconds > 0 ? { retry_after_s: seconds, ...body } : body;
}

/** @param {number} status @param {any} body */
function messageOf(status, body) {
  if (typeof body?.detail === "string" && body.detail !== "") return body.detail;
  if (Array.isArray(body?.detail)) return "The request is not valid.";
  return `The server answered ${status}.`;
}

/** @param {any} body */
function problemsOf(body) {
  const list = Array.isArray(body?.errors) ? body.errors : Array.isArray(body?.detail) ? body.detail : [];
  return list.map((/** @type {any} */ problem) => ({
    loc: Array.isArray(problem?.loc) ? problem.loc : [],
    msg: String(problem?.msg ?? problem?.message ?? problem),
  }));
}
