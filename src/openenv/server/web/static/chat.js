/**
 * A conversation with the environment: what was said, and a line to say something.
 */

import { el, fill, icon } from "./element.js";
import { sourceOf } from "./image.js";
import { isRecord, shapeOf } from "./schema.js";
import { formatReward, shortJson, textBlock } from "./values.js";

const SPEAKING = ["message", "text", "content", "prompt"];
const ANSWERING = [
  "message",
  "response",
  "reply",
  "text",
  "content",
  "output",
  "answer",
  "prompt",
  "echoed_message",
  "result",
];
const MOST_SHOWN = 100;

/**
 * Return the field that a chat fills, null if there is no conversation to have.
 * @param {any} page
 * @returns {string | null}
 */
export function chatField(page) {
  if (page.is_chat) return "message";
  const { properties } = shapeOf(page.action.schema, page.action.schema).schema;
  const names = Object.keys(properties ?? {}).filter((name) => name !== "metadata");
  if (names.length !== 1 || !SPEAKING.includes(names[0])) return null;
  return shapeOf(properties[names[0]], page.action.schema).kind === "string" ? names[0] : null;
}

/** The transcript and the line below it. */
export class Chat {
  /**
   * @param {import("./episode.js").Episode} episode
   * @param {object} options
   * @param {string} options.field
   * @param {(text: string) => Promise<boolean>} options.send - True when it was taken.
   * @param {(text: string) => void} options.onChange
   */
  constructor(episode, { field, send, onChange }) {
    this.episode = episode;
    this.field = field;
    this.sendText = send;
    /** @type {string | null} */
    this.pending = null;
    this.lines = el("ol.transcript", { role: "log", "aria-label": "Conversation", tabindex: 0 });
    this.input = el("textarea", {
      id: "chat-input",
      rows: 1,
      placeholder: "Say something",
      "aria-label": "Message",
      autocomplete: "off",
      on: {
        keydown: (/** @type {KeyboardEvent} */ event) => this.#key(event),
        input: () => onChange(this.input.value),
      },
    });
    this.problem = el("p.field-error", { role: "alert", hidden: true });
    this.button = el("button.primary", { type: "button", on: { click: () => this.send() } }, icon("send"), "Send");
    const line = el("div.composer", {}, this.input, this.button);
    this.node = el(
      "section.card.chat",
      {},
      el("div.card-head", {}, el("h2", {}, "Conversation")),
      this.lines,
      this.problem,
      line,
      el("p.hint", {}, "Enter sends, Shift+Enter begins a new line."),
    );
    this.version = -1;
    episode.subscribe(() => this.#draw());
  }

  /** Send what is written. */
  async send() {
    const text = this.input.value;
    if (text.trim() === "") return;
    this.problem.hidden = true;
    this.pending = text;
    this.#draw();
    const isTaken = await this.sendText(text);
    this.pending = null;
    if (isTaken && this.input.value === text) this.input.value = "";
    this.#draw();
    this.input.focus();
  }

  /** @param {string} message */
  showProblem(message) {
    this.problem.textContent = message;
    this.problem.hidden = false;
  }

  /** @param {boolean} isFree */
  setFree(isFree) {
    this.button.setAttribute("aria-disabled", String(!isFree));
  }

  /** @param {KeyboardEvent} event */
  #key(event) {
    if (event.key !== "Enter" || event.shiftKey || event.ctrlKey || event.metaKey || event.isComposing) return;
    event.preventDefault();
    this.send();
  }

  #draw() {
    const { episode } = this;
    const isAtEnd = this.lines.scrollHeight - this.lines.scrollTop - this.lines.clientHeight < 80;
    const steps = episode.steps.slice(-MOST_SHOWN);
    const first = episode.first && episode.dropped === 0 ? answer(episode.first) : null;
    fill(
      this.lines,
      first && bubble("env", first, null),
      steps.flatMap((entry) => [
        bubble("me", said(entry.action, this.field), null),
        bubble("env", answer(entry.observation), entry),
      ]),
      this.pending !== null && bubble("me", this.pending, null),
      this.pending !== null && el("li.bubble.is-env", { "aria-label": "The environment is working" }, "···"),
      steps.length === 0 &&
        this.pending === null &&
        !first &&
        el("li.empty-line", {}, "No message yet. Say something to begin."),
    );
    if (isAtEnd) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

/** @param {"me" | "env"} who @param {string} text @param {import("./episode.js").StepEntry | null} entry */
function bubble(who, text, entry) {
  const picture = sourceOf(text);
  const body = picture ? el("img", { src: picture, alt: "Image" }) : textBlock(text);
  const hasReward = entry && entry.reward !== null && entry.reward !== undefined;
  const note =
    entry &&
    (hasReward || entry.done) &&
    el("span.bubble-note", {}, hasReward && `reward ${formatReward(entry.reward)}`, entry.done && " · done");
  return el(`li.bubble.is-${who}`, {}, el("span.unseen", {}, who === "me" ? "You: " : "Environment: "), body, note);
}

/** @param {any} action @param {string} field */
function said(action, field) {
  if (typeof action === "string") return action;
  const text = isRecord(action) ? (action[field] ?? action.message) : null;
  return typeof text === "string" ? text : shortJson(action, 400);
}

/** Find what an observation says. @param {any} observation @returns {string} */
export function answer(observation) {
  if (!isRecord(observation)) return shortJson(observation, 2000);
  const last = Array.isArray(observation.messages) ? observation.messages.at(-1) : null;
  if (typeof last?.content === "string") return last.content;
  for (const name of ANSWERING)
    if (typeof observation[name] === "string" && observation[name] !== "") return observation[name];
  const texts = Object.entries(observation)
    .filter(([, value]) => typeof value === "string")
    .map(([, value]) => value);
  const longest = texts.sort((one, other) => other.length - one.length)[0];
  if (longest) return longest;
  const { reward, done, metadata, ...rest } = observation;
  return Object.keys(rest).length
    ? shortJson(rest, 2000)
    : typeof metadata?.message === "string"
      ? metadata.message
      : "…";
}
