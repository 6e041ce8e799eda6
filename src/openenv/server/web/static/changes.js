/**
 * The files that an agent changed, line by line against what the setup left.
 */

import { rolloutApi } from "./api.js";
import { el, fill } from "./element.js";
import { folded, formatCount, visible } from "./texts.js";

const OPEN_FILES = 5;
const OPEN_LINES = 400;
const MARKS = { "+": "added", "-": "removed", " ": "same", "@": "place" };

/** Changes, asked for when they are first looked at. */
export class ChangesView {
  /** @param {string} id */
  constructor(id) {
    this.id = id;
    this.node = el("div.changes", {}, el("p.hint", {}, "Comparing…"));
  }

  async load() {
    try {
      this.#draw(await rolloutApi.one(this.id, "changes"));
    } catch (error) {
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  }

  /** @param {any} changes */
  #draw({ files, unchanged, left_out: leftOut, note }) {
    const counts = ["added", "changed", "removed"].map((kind) => [
      kind,
      files.filter((/** @type {any} */ file) => file.change === kind).length,
    ]);
    const words = counts.filter(([, count]) => count).map(([kind, count]) => `${count} ${kind}`);
    const summary = `${words.join(", ") || "No file changed"}; ${formatCount(unchanged)} unchanged since the setup`;
    let lines = 0;
    const nodes = files.map((/** @type {any} */ file, /** @type {number} */ index) => {
      lines += file.lines.length;
      return fileNode(file, index < OPEN_FILES && lines <= OPEN_LINES);
    });
    fill(
      this.node,
      note && el("p.problem", {}, note),
      !(note && files.length === 0) && el("p.hint", {}, summary),
      nodes,
      leftOut > 0 && el("p.hint", {}, `${formatCount(leftOut)} more changed files are not listed.`),
    );
  }
}

/** @param {any} file @param {boolean} isOpen */
function fileNode(file, isOpen) {
  const title = [
    el("span.badge", { class: `badge change-${file.change}` }, file.change),
    el("code", {}, visible(file.path)),
    el("span.plus", {}, `+${file.added}`),
    el("span.minus", {}, `−${file.removed}`),
    el("span.hint", {}, `${formatCount(file.size)} bytes`),
  ];
  return folded(title, () => diffNode(file), { isOpen, kind: ".file" });
}

/** @param {any} file */
function diffNode(file) {
  const rows = file.lines.map((/** @type {any} */ line) =>
    el(
      "div.diff-line",
      { data: { mark: MARKS[/** @type {keyof typeof MARKS} */ (line.mark)] } },
      el("span.diff-number", {}, line.old ?? ""),
      el("span.diff-number", {}, line.new ?? ""),
      el("span.diff-mark", {}, line.mark),
      el("span.diff-text", {}, visible(line.text)),
    ),
  );
  return el(
    "div",
    {},
    file.note && el("p.hint", {}, file.note),
    rows.length > 0 && el("div.diff", { tabindex: 0, role: "group", "aria-label": `Changes of ${file.path}` }, rows),
  );
}
