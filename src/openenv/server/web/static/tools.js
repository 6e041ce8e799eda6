/**
 * Tools: the environment's MCP tools, a form for each, and what the last call of it returned.
 */

import { el, fill, icon } from "./element.js";
import { Form } from "./form.js";
import { PythonBox, callSource } from "./python.js";
import { Progress } from "./progress.js";
import { isRecord, withoutDefaults } from "./schema.js";
import { withCode } from "./texts.js";
import { formatDuration } from "./values.js";
import { resultNode } from "./view.js";

/** @typedef {{name: string, title?: string | null, description?: string | null, input_schema: any}} Tool */

/** The list of tools and the chosen one. */
export class Tools {
  /**
   * @param {Tool[]} tools
   * @param {import("./player.js").Player} player
   * @param {{needsToken: boolean, canReset: boolean, hasRollouts: boolean}} setting
   */
  constructor(tools, player, setting) {
    this.tools = tools;
    this.player = player;
    this.setting = setting;
    /** @type {Map<string, ToolPanel>} */
    this.panels = new Map();
    this.python = new PythonBox("The same call in Python");
    this.progress = new Progress(player);
    this.list = el("ul.tool-list", { "aria-label": "Tools" });
    this.body = el("div.tool-body");
    this.buttons = tools.map((tool) =>
      el(
        "button.tool-name",
        { type: "button", on: { click: () => this.choose(tool.name) } },
        el("span.mono", {}, tool.name),
        tool.description && el("span.tool-about", {}, firstLine(tool.description)),
      ),
    );
    fill(
      this.list,
      this.buttons.map((button) => el("li", {}, button)),
    );
    const side = el("div.side", {}, el("section.card", {}, el("h2", {}, "Tools"), this.list), this.python.node);
    this.node = tools.length
      ? el("div.columns", {}, side, this.body)
      : el("p.empty-line", {}, "This environment lists no tools.");
    if (tools.length) this.choose(tools[0].name);
    player.episode.subscribe(() => this.#update());
  }

  /** @param {string} name */
  choose(name) {
    const tool = this.tools.find((tool) => tool.name === name);
    if (!tool) return;
    this.chosen = this.panels.get(name) ?? this.#panel(tool);
    this.panels.set(name, this.chosen);
    this.tools.forEach((tool, index) => this.buttons[index].setAttribute("aria-current", String(tool.name === name)));
    this.chosen.node.firstElementChild?.append(this.progress.node);
    fill(this.body, this.chosen.node);
    this.#source();
    this.#update();
  }

  /** @param {Tool} tool */
  #panel(tool) {
    const { hasRollouts } = this.setting;
    return new ToolPanel(tool, this.player, { onChange: () => this.#source(), hasRollouts });
  }

  /** Call the chosen tool. */
  submit() {
    this.chosen?.call();
  }

  #source() {
    if (!this.chosen) return;
    const { tool, form } = this.chosen;
    const args = withoutDefaults(form.peek(), tool.input_schema);
    if (isRecord(args)) this.python.show(callSource({ ...this.setting, name: tool.name, args }));
  }

  #update() {
    this.chosen?.setFree(this.player.isFree);
  }
}

/** One tool. */
class ToolPanel {
  /**
   * @param {Tool} tool
   * @param {import("./player.js").Player} player
   * @param {{onChange: () => void, hasRollouts: boolean}} options
   */
  constructor(tool, player, { onChange, hasRollouts }) {
    this.tool = tool;
    this.hasRollouts = hasRollouts;
    this.player = player;
    const schema = tool.input_schema ?? { type: "object" };
    this.form = new Form(schema, { label: tool.name, onChange, onSubmit: () => this.call() });
    this.button = el("button.primary", { type: "button", on: { click: () => this.call() } }, icon("play"), "Call");
    this.result = el("div.result", { "aria-live": "polite" }, el("p.empty-line", {}, "The result appears here."));
    const about = typeof tool.description === "string" && el("p.about", {}, withCode(tool.description));
    this.node = el(
      "div.stack",
      {},
      el(
        "section.card",
        {},
        el("div.card-head", {}, el("h2.mono", {}, tool.name), this.form.toggle),
        about,
        this.form.node,
        el("div.actions", {}, this.button),
      ),
      el("section.card", {}, el("div.card-head", {}, el("h2", {}, "Result")), this.result),
    );
  }

  /** @param {boolean} isFree */
  setFree(isFree) {
    this.button.setAttribute("aria-disabled", String(!isFree));
  }

  /** The view of a rollout, where the result is one that this server keeps. @param {any} result */
  async #rollout(result) {
    const id = this.hasRollouts ? rolloutId(result) : null;
    if (id === null) return null;
    const { rolloutView } = await import("./rollouts.js");
    return rolloutView(id);
  }

  async call() {
    const read = this.form.read();
    if (!read || !this.player.isFree) return;
    const started = performance.now();
    const { reply, error } = await this.player.call(this.tool.name, read.value);
    const took = formatDuration(performance.now() - started);
    if (error?.problems.length) return this.form.showErrors(error.problems);
    if (error) return fill(this.result, failure(error.message));
    if (reply)
      fill(
        this.result,
        el("p.hint", {}, `took ${took}`),
        reply.error ? failure(textOf(reply.error)) : ((await this.#rollout(reply.result)) ?? resultNode(reply.result)),
      );
  }
}

/** The id of the rollout that a tool has run and stored, if its result is one. @param {any} result */
function rolloutId(result) {
  const texts = Array.isArray(result?.content) ? result.content.map((/** @type {any} */ part) => part?.text) : [result];
  for (const text of texts) {
    try {
      const value = typeof text === "string" ? JSON.parse(text) : text;
      if (isRecord(value) && typeof value.rollout_id === "string" && value.rollout_id !== "") return value.rollout_id;
    } catch {
      continue; // no JSON
    }
  }
  return null;
}

/** @param {string} message */
function failure(message) {
  return el("div.notice.is-error", { role: "alert" }, message);
}

/** @param {any} error */
function textOf(error) {
  return typeof error === "string" ? error : typeof error?.message === "string" ? error.message : JSON.stringify(error);
}

/** @param {string} text */
function firstLine(text) {
  return text.trim().split("\n")[0];
}
