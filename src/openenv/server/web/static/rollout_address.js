/**
 * Addresses of rollouts, behind the `#` of the page's: they stay valid as long as the store is there.
 *
 *   #rollouts?status=ok&order=reward    the list, filtered
 *   #rollouts/3f2a/files                one rollout, and which part of it
 *   #rollouts/3f2a/with/77b0            two side by side
 */

/**
 * @typedef {{name: "list", query: URLSearchParams}
 *   | {name: "one", id: string, part: string, query: URLSearchParams}
 *   | {name: "pair", ids: [string, string]}} Place
 */

const ROOT = "#rollouts";

/** Say whether an address is one of a rollout, or of their list. @param {string} hash */
export function isOfRollouts(hash) {
  return hash === ROOT || hash.startsWith(`${ROOT}/`) || hash.startsWith(`${ROOT}?`);
}

/** @param {string} hash @returns {Place} */
export function placeOf(hash) {
  const [path, query = ""] = (isOfRollouts(hash) ? hash.slice(ROOT.length) : "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map(decoded);
  const parameters = new URLSearchParams(query);
  if (parts.length === 0) return { name: "list", query: parameters };
  if (parts[1] === "with" && parts[2]) return { name: "pair", ids: [parts[0], parts[2]] };
  return { name: "one", id: parts[0], part: parts[1] ?? "", query: parameters };
}

/** @param {URLSearchParams} query */
export function listAddress(query) {
  const text = String(query);
  return text ? `${ROOT}?${text}` : ROOT;
}

/** @param {string} id @param {string} [part] @param {string} [verdict] */
export function rolloutAddress(id, part = "", verdict = "") {
  const query = verdict ? `?${new URLSearchParams({ verdict })}` : "";
  return `${ROOT}/${encodeURIComponent(id)}${part && `/${part}`}${query}`;
}

/** @param {string} one @param {string} other */
export function pairAddress(one, other) {
  return `${ROOT}/${encodeURIComponent(one)}/with/${encodeURIComponent(other)}`;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
