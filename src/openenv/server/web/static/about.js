/**
 * About the environment: its README, how to begin in Python, and the shape of its actions.
 */

import { copyButton } from "./copy.js";
import { el } from "./element.js";
import { Tree } from "./tree.js";

/** @param {any} page */
export function aboutNode(page) {
  const facts = [
    ["Version", page.version],
    ["Author", page.author],
    ["Mode", page.mode],
    ["Sessions at once", page.max_sessions],
    ["Tools", page.tools ? page.tools.length : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  const list = el(
    "dl.facts",
    {},
    facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, String(value)))),
  );
  const source = page.quick_start?.text ?? "";
  const start = el(
    "section.card.python",
    {},
    el(
      "div.card-head",
      {},
      el("h2", {}, "Quick start"),
      copyButton(() => source),
    ),
    el("pre.source", { tabindex: 0, role: "region", "aria-label": "Quick start" }, el("code", {}, source)),
  );
  const schema = new Tree();
  schema.show(page.action.schema);
  const shape = el("details.fold.card", {}, el("summary", {}, "Schema of an action"), schema.node);
  const side = el("div.side", {}, el("section.card", {}, el("h2", {}, "About"), list), source !== "" && start, shape);
  return el("div.columns.is-reversed", {}, side, el("section.card.readme", {}, readme(page)));
}

/**
 * The README, which the server has rendered without any HTML of its own. Pictures from elsewhere are named, not loaded.
 * @param {any} page
 */
function readme(page) {
  if (!page.readme_html) {
    return el(
      "div.empty",
      {},
      el("h2", {}, "No README"),
      el("p", {}, page.description ?? "This environment does not describe itself."),
    );
  }
  const template = document.createElement("template");
  template.innerHTML = page.readme_html;
  for (const image of template.content.querySelectorAll("img")) {
    if (!/^data:image\//.test(image.getAttribute("src") ?? "")) image.replaceWith(el("em", {}, image.alt || "picture"));
  }
  for (const title of template.content.querySelectorAll("th")) {
    if (!title.textContent?.trim()) title.replaceWith(el("td"));
  }
  for (const link of template.content.querySelectorAll("a")) {
    const href = link.getAttribute("href") ?? "";
    if (/^https?:/.test(href)) {
      link.target = "_blank";
      link.rel = "noopener noreferrer";
    } else if (!href.startsWith("#") && !href.startsWith("mailto:")) {
      link.removeAttribute("href"); // a file beside the README, which is not served
    }
  }
  for (const block of template.content.querySelectorAll("pre, table")) {
    const box = el("div.scroll", { tabindex: 0 });
    block.replaceWith(box);
    box.append(block);
  }
  return template.content;
}
