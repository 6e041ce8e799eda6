/**
 * Addresses of tabs and of what they show, behind the `#` of the page's.
 *
 *   #history                            a tab
 *   #episodes/2026...?step=3            an episode, at a step
 *   #episodes/2026.../with/2026...      two side by side
 *   #sessions/3f2a...                   a session that is watched
 */

/** @typedef {{tab: string, parts: string[], query: URLSearchParams}} PagePlace */

/** @param {string} hash @returns {PagePlace} */
export function pagePlace(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?", 2);
  const [tab = "", ...parts] = path.split("/").filter(Boolean).map(decoded);
  return { tab, parts, query: new URLSearchParams(query) };
}

/** @param {string} tab @param {string[]} [parts] @param {Record<string, string>} [query] */
export function pageAddress(tab, parts = [], query = {}) {
  const text = String(new URLSearchParams(query));
  return `#${[tab, ...parts.map(encodeURIComponent)].join("/")}${text && `?${text}`}`;
}

/** @param {string} text */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}
