/**
 * Values as people read them: numbers, times, short JSON, and text of any length.
 */

import { el } from "./element.js";

const MOST_TEXT = 20_000;

/** @param {any} value */
export function formatNumber(value) {
  if (typeof value === "boolean") return value ? "1" : "0";
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return String(value);
  return String(Number(value.toPrecision(5))).replace("-", "−");
}

/** A reward with its sign. @param {any} value */
export function formatReward(value) {
  if (value === null || value === undefined) return "–";
  const text = formatNumber(value).replace("-", "−");
  return Number(value) > 0 ? `+${text}` : text;
}

/** @param {number} ms */
export function formatDuration(ms) {
  if (typeof ms !== "number" || !Number.isFinite(ms)) return "";
  if (ms < 1) return "<1 ms";
  if (ms < 1000) return `${Math.round(ms)} ms`;
  return formatSeconds(ms / 1000);
}

/** @param {number} seconds */
export function formatSeconds(seconds) {
  if (typeof seconds !== "number" || !Number.isFinite(seconds)) return "";
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

/** @param {string | number | null | undefined} timestamp - ISO text, or seconds since 1970. */
export function formatTime(timestamp) {
  if (timestamp === null || timestamp === undefined) return "";
  const date = new Date(typeof timestamp === "number" ? timestamp * 1000 : timestamp);
  return Number.isNaN(date.getTime()) ? String(timestamp) : date.toLocaleTimeString([], { hour12: false });
}

/** JSON in one line, cut where it is long. @param {any} value @param {number} [most] */
export function shortJson(value, most = 120) {
  const text = typeof value === "string" ? value : (JSON.stringify(value) ?? "");
  return text.length > most ? `${text.slice(0, most - 1)}…` : text;
}

/** An action without what says nothing: its empty metadata, its fixed type. @param {any} action */
export function briefAction(action) {
  if (action === null || typeof action !== "object" || Array.isArray(action)) return shortJson(action);
  const { metadata, ...rest } = action;
  const hasMetadata = metadata && Object.keys(metadata).length > 0;
  const shown = hasMetadata ? action : rest;
  if (shown.type === "call_tool" && typeof shown.tool_name === "string") {
    return `${shown.tool_name}(${brief(shown.arguments ?? {})})`;
  }
  return brief(shown) || "{}";
}

/** @param {Record<string, any>} record */
function brief(record) {
  const names = Object.keys(record);
  const most = names.length === 1 ? 80 : 40;
  return names.map((name) => `${name}: ${record[name] === "" ? '""' : shortJson(record[name], most)}`).join(", ");
}

/**
 * Text of any length: drawn in fixed width where it has several lines, and cut with a button to see the rest.
 * @param {string} text
 */
export function textBlock(text) {
  const isDrawn = /\n/.test(text) || /[\u2500-\u259f]/.test(text);
  const block = el(isDrawn ? "pre.text" : "p.text.prose", { dir: "auto" }, text.slice(0, MOST_TEXT));
  block.classList.toggle("is-drawing", /[\u2500-\u259f]/.test(text));
  if (text.length <= MOST_TEXT) return block;
  const more = el("button.link", { type: "button" }, `Show all ${text.length} characters`);
  more.addEventListener("click", () => {
    block.textContent = text;
    more.remove();
  });
  return el("div", {}, block, more);
}
