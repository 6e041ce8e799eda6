/**
 * Boards: two-dimensional lists of few different things, as a grid of coloured cells.
 */

import { el } from "./element.js";

const MOST_SIDE = 40;
const MOST_KINDS = 40;
const LONGEST_CELL = 4;
const EMPTY = new Set(["", " ", ".", "0", "_", "-", "·"]);
const BOARD_NAME = /(board|grid|map|maze|tiles|cells|world|field)/i;
const COLOURS = 12;

/**
 * Return the element that shows a value as a board, or null if it is none.
 * @param {any} value
 * @param {string} name
 * @returns {HTMLElement | null}
 */
export function boardOf(value, name) {
  const rows = rowsOf(value, name);
  if (!rows) return null;
  const kinds = new Set(rows.flat().filter((cell) => !EMPTY.has(cell)));
  if (kinds.size > MOST_KINDS) return null;
  const lines = rows.map((row) =>
    el(
      "div.board-row",
      { role: "row" },
      row.map(cellOf),
    ),
  );
  const columns = rows[0].length;
  const label = `${name}: ${rows.length} rows, ${columns} columns`;
  const board = el("div.board", { role: "table", "aria-label": label }, lines);
  board.style.setProperty("--columns", String(columns));
  board.classList.toggle("is-dense", columns > 12);
  return el("div.scroll", { tabindex: 0, role: "group", "aria-label": name }, board);
}

/** @param {string} cell */
function cellOf(cell) {
  const kind = EMPTY.has(cell) ? "none" : colourOf(cell);
  return el("span.cell", { role: "cell", data: { kind } }, EMPTY.has(cell) ? "" : cell);
}

/**
 * A symbol keeps its colour on every board, whatever else is on it. Numbers have fixed ones; other symbols prefer the
 * one that their characters give, and take the next where another symbol has that already.
 * @param {string} cell
 */
function colourOf(cell) {
  if (cell === "#") return "wall";
  const number = Number(cell);
  if (Number.isInteger(number) && number > 0) return String((number - 1) % COLOURS);
  let colour = colours.get(cell);
  if (colour === undefined) {
    const wish = [...cell].reduce((sum, character) => sum * 7 + (character.codePointAt(0) ?? 0), 0) % COLOURS;
    const taken = new Set(colours.values());
    const places = Array.from({ length: COLOURS }, (_, index) => (wish + index) % COLOURS);
    colour = places.find((place) => !taken.has(place)) ?? wish;
    colours.set(cell, colour);
  }
  return String(colour);
}

/** @type {Map<string, number>} */
const colours = new Map();

/**
 * Read a value as rows of short texts.
 * @param {any} value
 * @param {string} name
 * @returns {string[][] | null}
 */
function rowsOf(value, name) {
  if (!Array.isArray(value) || value.length < 2) return null;
  if (value.every((row) => typeof row === "string")) return rowsOfText(value, name);
  if (value.every(isCell)) return rowsOfFlat(value, name);
  const columns = value[0]?.length;
  const isGrid = value.every((row) => Array.isArray(row) && row.length === columns && row.every(isCell));
  if (!isGrid || columns < 2 || value.length > MOST_SIDE || columns > MOST_SIDE) return null;
  return value.map((row) => row.map(textOf));
}

/** Rows that are written as text, one character for each cell. @param {string[]} rows @param {string} name */
function rowsOfText(rows, name) {
  const columns = [...rows[0]].length;
  if (columns < 2 || columns > MOST_SIDE || rows.length > MOST_SIDE) return rowsOfFlat(rows, name);
  if (rows.some((row) => [...row].length !== columns)) return null;
  const kinds = new Set(rows.flatMap((row) => [...row]));
  const isLikely = BOARD_NAME.test(name) ? kinds.size <= MOST_KINDS : kinds.size <= 6;
  return isLikely ? rows.map((row) => [...row]) : null;
}

/** A square board that is written in one list, such as nine cells. @param {any[]} cells @param {string} name */
function rowsOfFlat(cells, name) {
  const side = Math.sqrt(cells.length);
  if (!BOARD_NAME.test(name) || !Number.isInteger(side) || side < 2 || side > MOST_SIDE || !cells.every(isCell))
    return null;
  return Array.from({ length: side }, (_, row) => cells.slice(row * side, (row + 1) * side).map(textOf));
}

/** @param {any} value */
function isCell(value) {
  if (value === null || typeof value === "boolean") return true;
  if (typeof value === "number") return Number.isInteger(value) && Math.abs(value) < 1e5;
  return typeof value === "string" && [...value].length <= LONGEST_CELL;
}

/** @param {any} value */
function textOf(value) {
  if (value === null || value === false) return "";
  return value === true ? "1" : String(value);
}
