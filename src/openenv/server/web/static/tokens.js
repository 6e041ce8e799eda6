/**
 * The tokens of one model call: coloured by how likely each was, marked where the loss leaves them out.
 */

import { rolloutApi } from "./api.js";
import { el, fill } from "./element.js";
import { visible } from "./texts.js";

const MOST = 4000;

/** @typedef {{t: string, i: number | null, p: number | null, h: number | null, m: number, a: [string, number][]}} Token */

/** Tokens that are asked for when they are first shown. */
export class Tokens {
  /** @param {string} id - Of the rollout. @param {number} turn */
  constructor(id, turn) {
    this.id = id;
    this.turn = turn;
    /** @type {Token[]} */
    this.tokens = [];
    this.shown = 0;
    this.at = -1;
    this.text = el("div.tokens", {
      tabindex: 0,
      role: "group",
      "aria-label": `Tokens of turn ${turn}; arrow keys move`,
    });
    this.readout = el("p.token-readout", { role: "status" }, "Point at a token, or use the arrow keys.");
    this.more = el("button.small", { type: "button", hidden: true, on: { click: () => this.#grow() } }, "Show more");
    this.node = el("div.tokens-box", {}, el("p.hint", {}, "Loading…"));
    this.text.addEventListener("pointerover", (event) => this.#point(/** @type {Element} */ (event.target)));
    this.text.addEventListener("keydown", (event) => this.#key(event));
    this.#load();
  }

  async #load() {
    try {
      const { tokens } = await rolloutApi.one(this.id, `tokens/${this.turn}`);
      this.tokens = tokens;
    } catch (error) {
      fill(this.node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
      return;
    }
    if (this.tokens.length === 0) {
      fill(this.node, el("p.hint", {}, "The engine reported no tokens for this call."));
      return;
    }
    fill(this.node, legend(this.tokens), this.text, this.more, this.readout);
    this.#grow();
  }

  #grow() {
    const part = this.tokens.slice(this.shown, this.shown + MOST);
    this.text.append(...part.map((token, index) => tokenNode(token, this.shown + index)));
    this.shown += part.length;
    this.more.hidden = this.shown >= this.tokens.length;
    this.more.textContent = `Show ${this.tokens.length - this.shown} more`;
  }

  /** @param {Element} target */
  #point(target) {
    const node = target.closest("[data-token]");
    if (node instanceof HTMLElement) this.#choose(Number(node.dataset.token));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    this.#choose(Math.min(Math.max(this.at + step, 0), this.shown - 1));
    this.text.children[this.at]?.scrollIntoView({ block: "nearest" });
  }

  /** @param {number} index */
  #choose(index) {
    this.text.children[this.at]?.classList.remove("is-chosen");
    this.at = index;
    this.text.children[index]?.classList.add("is-chosen");
    const token = this.tokens[index];
    if (!token) return;
    const others = token.a.map(([text, value]) =>
      el("li", {}, el("code", {}, visible(quoted(text))), ` ${percent(value)}`),
    );
    fill(
      this.readout,
      el("code", {}, visible(quoted(token.t || `⟨${token.i}⟩`))),
      ` number ${index + 1}`,
      token.i !== null && `, id ${token.i}`,
      token.p !== null && `, log-probability ${token.p.toFixed(4)} (${percent(token.p)})`,
      token.h !== null && `, entropy at least ${token.h.toFixed(3)}`,
      token.m ? ", trained on" : ", not in the loss",
      others.length > 0 && el("ul.alternatives", { "aria-label": "Alternatives" }, others),
    );
  }
}

/** @param {Token[]} tokens */
function legend(tokens) {
  const masked = tokens.filter((token) => !token.m).length;
  const steps = [0, -0.1, -0.7, -2.3, -4.6];
  return el(
    "p.token-legend",
    {},
    steps.map((value) =>
      el("span.token", { class: `token ${shade(value)}` }, value === 0 ? "p = 1" : `${Math.exp(value).toFixed(2)}`),
    ),
    el("span.token.is-masked", {}, "not in the loss"),
    el("span.hint", {}, `${tokens.length} tokens, ${tokens.length - masked} trained on`),
  );
}

/** @param {Token} token @param {number} index */
function tokenNode(token, index) {
  const text = token.t === "" || token.t.startsWith("token_id:") ? `⟨${token.i ?? "?"}⟩` : token.t;
  const lines = text.split("\n");
  const parts = lines.flatMap((line, number) =>
    number ? [el("span.newline", {}, "⏎\n"), ...visible(line)] : visible(line),
  );
  const node = el("span.token", { data: { token: index } }, parts);
  node.classList.add(shade(token.p));
  node.classList.toggle("is-masked", !token.m);
  return node;
}

/** Say how a log-probability is coloured; eleven steps, so that styles need not be set one by one. @param {number | null} value */
function shade(value) {
  if (value === null) return "p-none";
  return `p-${Math.min(10, Math.round((-value / Math.LN10) * 4))}`;
}

/** @param {number} value */
function percent(value) {
  const chance = Math.exp(value);
  return chance < 0.001 ? "<0.1 %" : `${(chance * 100).toFixed(1)} %`;
}

/** @param {string} text */
function quoted(text) {
  return text.replace(/\n/g, "⏎").replace(/ /g, "·");
}
