/**
 * Length and entropy per turn, as bars and a line; each turn can be gone to.
 */

import { el, svg } from "./element.js";
import { formatCount } from "./texts.js";

const HEIGHT = 96;
const TOP = 8;
const BASE = 78;
const WIDEST = 26;
const LEAST = 5;

/**
 * @param {any[]} turns
 * @param {(number: number) => void} goTo
 */
export function turnChart(turns, goTo) {
  const step = Math.max(LEAST, Math.min(WIDEST, 900 / turns.length));
  const width = Math.max(120, turns.length * step + 8);
  const most = Math.max(1, ...turns.map((turn) => turn.sampled_tokens));
  const entropies = turns.map((turn) => turn.mean_entropy ?? (turn.mean_logprob === null ? null : -turn.mean_logprob));
  const highest = Math.max(0.1, ...entropies.map((value) => value ?? 0));
  const isEntropy = turns.some((turn) => turn.mean_entropy !== null);
  const x = (/** @type {number} */ index) => 4 + index * step;
  const y = (/** @type {number} */ share) => BASE - share * (BASE - TOP);
  const drawing = svg("svg", {
    class: "turn-chart",
    width,
    height: HEIGHT,
    viewBox: `0 0 ${width} ${HEIGHT}`,
    "aria-hidden": "true",
  });
  turns.forEach((turn, index) => {
    const height = Math.max(1, BASE - y(turn.sampled_tokens / most));
    const trained = turn.sampled_tokens ? turn.trained_tokens / turn.sampled_tokens : 0;
    const bar = svg("g", { class: "turn-bar", "data-branch": turn.branch });
    const title = `Turn ${turn.number}: ${turn.sampled_tokens} tokens, ${turn.trained_tokens} trained on`;
    bar.append(
      svg("title", {}, title),
      svg("rect", { class: "turn-hit", x: x(index), y: 0, width: step, height: HEIGHT }),
      svg("rect", { class: "turn-all", x: x(index) + 1, y: BASE - height, width: Math.max(1, step - 2), height }),
      svg("rect", {
        class: "turn-trained",
        x: x(index) + 1,
        y: BASE - height * trained,
        width: Math.max(1, step - 2),
        height: height * trained,
      }),
    );
    bar.addEventListener("click", () => goTo(turn.number));
    drawing.append(bar);
    if (step > 14 || index % 10 === 0)
      drawing.append(
        svg(
          "text",
          { class: "plot-text", x: x(index) + step / 2, y: HEIGHT - 4, "text-anchor": "middle" },
          turn.number,
        ),
      );
  });
  const line = entropies
    .map((value, index) =>
      value === null ? null : `${(x(index) + step / 2).toFixed(1)},${y(value / highest).toFixed(1)}`,
    )
    .filter(Boolean);
  if (line.length) drawing.append(svg("path", { class: "turn-line", d: `M${line.join("L")}` }));
  const known = entropies.filter((value) => value !== null);
  const summary = [
    `${formatCount(turns.reduce((sum, turn) => sum + turn.sampled_tokens, 0))} tokens in ${turns.length} ${turns.length === 1 ? "turn" : "turns"}`,
    known.length > 0 && `${isEntropy ? "entropy" : "surprisal"} up to ${highest.toFixed(2)} nats a token`,
  ].filter(Boolean);
  return el(
    "figure.chart",
    {},
    el(
      "figcaption.toolbar",
      {},
      el("span.hint", {}, summary.join("; ")),
      el("span.key.is-bar", {}, "tokens"),
      el("span.key.is-trained", {}, "trained on"),
      known.length > 0 && el("span.key.is-line", {}, isEntropy ? "mean entropy" : "mean surprisal"),
    ),
    el("div.scroll", { tabindex: 0, role: "group", "aria-label": "Length and entropy per turn" }, drawing),
  );
}
