/**
 * The parts of a rollout's page that do not change: its head with figures and links, its task, its setup, its record.
 */

import { rolloutApi } from "./api.js";
import { rewardBadge, statusBadge, trustBadge } from "./badges.js";
import { copyButton } from "./copy.js";
import { el, fill, icon, uniqueId } from "./element.js";
import { pairAddress, rolloutAddress } from "./rollout_address.js";
import { codeBlock, firstLine, folded, formatAge, formatMoment, visible } from "./texts.js";
import { Tree } from "./tree.js";
import { formatSeconds } from "./values.js";
import { checkNode } from "./verdicts.js";

export function backLink() {
  return el("a", { href: "#rollouts", on: { click: goBack } }, "← All rollouts");
}

/**
 * Links to the rollouts before and after one in the list that the visitor came from.
 * @param {{before: string | null, after: string | null}} beside
 * @param {(id: string) => string} addressOf
 * @param {(id: string) => void} goTo
 */
export function besideLinks({ before, after }, addressOf, goTo) {
  const link = (/** @type {string | null} */ id, /** @type {"back" | "forward"} */ name, /** @type {string} */ text) => {
    const children = name === "back" ? [icon(name), text] : [text, icon(name)];
    if (id === null) return el("button.small", { type: "button", disabled: true }, children);
    const go = (/** @type {MouseEvent} */ event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) return;
      event.preventDefault();
      goTo(id);
    };
    const title = name === "back" ? "Previous rollout (key p)" : "Next rollout (key n)";
    return el("a.button.small", { href: addressOf(id), title, rel: name === "back" ? "prev" : "next", on: { click: go } }, children);
  };
  return [link(before, "back", "Previous"), link(after, "forward", "Next")];
}

/** Go back to the list as it was, if the visitor came from it. @param {Event} event */
function goBack(event) {
  if (history.state?.isFromList) {
    event.preventDefault();
    history.back();
  }
}

/** @param {any} rollout */
export function begunHead({ rollout_id: id, begun }) {
  const state = begun.is_running ? "busy" : "lost";
  return el(
    "header.rollout-head.card",
    {},
    el("h2", {}, visible(begun.task_id || id)),
    el(
      "p.badges",
      {},
      el(
        "span.chip",
        { role: "status", data: { state } },
        begun.is_running ? "running" : "interrupted: its engine died",
      ),
    ),
    facts({
      Agent: begun.agent,
      Model: begun.model,
      Sandbox: begun.sandbox,
      Group: begun.group,
      Begun: formatMoment(begun.began_at),
      ID: id,
    }),
  );
}

/** @param {any} rollout @param {string} verdict */
export function storedHead(rollout, verdict) {
  const { outcome, task, rollout_id: id } = rollout;
  const count = rollout.verdicts.length;
  const field = uniqueId("compare");
  const other = el("input", { id: field, placeholder: "id", autocomplete: "off", size: 12 });
  const form = el(
    "form.compare-with",
    {},
    el("label.hint", { for: field }, "Compare with"),
    other,
    el("button.small", {}, "Compare"),
  );
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (other.value.trim()) location.hash = pairAddress(id, other.value.trim());
  });
  return el(
    "header.rollout-head.card",
    {},
    el("h2", {}, visible(outcome.task_id || id)),
    el(
      "p.badges",
      {},
      el("span.reward-label", {}, "Reward"),
      rewardBadge(outcome.reward),
      trustBadge(outcome.trust),
      statusBadge(outcome.status, outcome.reason),
      verdict && el("span.badge", {}, `verdict ${rollout.verdict}`),
      count > 1 && el("span.badge", {}, `${count} verdicts`),
    ),
    task?.instruction && el("p.instruction", { dir: "auto" }, visible(firstLine(task.instruction, 300))),
    outcome.reason && el("p.problem", {}, outcome.phase ? `${outcome.phase}: ` : "", visible(outcome.reason)),
    facts({
      Environment: outcome.metadata?.environment ?? task?.metadata?.environment ?? "",
      Agent: outcome.agent,
      Model: outcome.model,
      "Policy version": outcome.metadata?.policy_version ?? "",
      Sandbox: outcome.sandbox,
      Group: rollout.group,
      Begun: `${formatMoment(outcome.started_at)} (${formatAge(Date.now() / 1000 - outcome.started_at)} ago)`,
      Took: formatSeconds(outcome.wall_s),
      Turns: String(rollout.turns),
      ID: id,
    }),
    el(
      "div.toolbar",
      {},
      copyButton(() => new URL(rolloutAddress(id, "", verdict), location.href).href, "Copy link"),
      form,
    ),
  );
}

/** @param {Record<string, string | number>} values */
function facts(values) {
  const shown = Object.entries(values).filter(([, value]) => value !== "" && value !== undefined && value !== null);
  return el(
    "dl.facts",
    {},
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, visible(String(value))))),
  );
}

/** @param {any} outcome */
export function setupNode(outcome) {
  if (!outcome || outcome.setup_results.length === 0) return null;
  const lines = () =>
    el(
      "ol.checks",
      {},
      outcome.setup_results.map((/** @type {any} */ result) => checkNode(result)),
    );
  return folded([`Setup, ${outcome.setup_results.length} lines`], lines);
}

/** @param {any} rollout */
export function taskNode({ task, outcome }) {
  if (!task) return el("p.hint", {}, "The task was not stored.");
  const texts = (/** @type {string} */ title, /** @type {Record<string, string>} */ files) =>
    Object.entries(files).map(([path, text]) =>
      folded([`${title} `, el("code", {}, visible(path))], () => codeBlock(text, { label: path })),
    );
  const { instruction, files, verify_files: verifyFiles, ...rest } = task;
  const tree = new Tree();
  tree.show({ ...rest, ...(outcome ? { outcome: outcome.metadata } : {}) });
  return el(
    "div.stack.is-tight",
    {},
    el("section", {}, el("h3", {}, "Instruction"), codeBlock(instruction, { kind: ".said" })),
    texts("File", files ?? {}),
    texts("File of the verifier", verifyFiles ?? {}),
    folded(["Everything else"], () => tree.node, { isOpen: true }),
  );
}

/** The stored record, as a tree, a file, and a copy. @param {string} id @param {string} verdict */
export function recordView(id, verdict) {
  const node = el("div.stack.is-tight", {}, el("p.hint", {}, "Loading…"));
  const query = new URLSearchParams(verdict ? { verdict } : {});
  const load = async () => {
    try {
      const record = await rolloutApi.one(id, "raw", query);
      const tree = new Tree();
      tree.show(record);
      const link = { href: rolloutApi.address(id, "raw", query), download: `rollout-${id}.json` };
      fill(
        node,
        el(
          "div.toolbar",
          {},
          copyButton(() => JSON.stringify(record, null, 2)),
          el("a.button.small", link, icon("save"), "Download JSON"),
        ),
        tree.node,
      );
    } catch (error) {
      fill(node, el("p.problem", { role: "alert" }, /** @type {Error} */ (error).message));
    }
  };
  return { node, load };
}
