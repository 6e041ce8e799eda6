/**
 * Copying text to the clipboard, with a word that it was done.
 */

import { el, fill, icon } from "./element.js";

const SHOWN_MS = 1600;

/**
 * @param {() => string} text
 * @param {string} [title]
 */
export function copyButton(text, title = "Copy") {
  const label = el("span", { role: "status" }, title);
  const picture = el("span.icon-box", {}, icon("copy"));
  const button = el("button.small", { type: "button" }, picture, label);
  let timer = 0;
  button.addEventListener("click", async () => {
    const isDone = await copy(text());
    fill(label, isDone ? "Copied" : "Press Ctrl+C");
    fill(picture, icon(isDone ? "tick" : "copy"));
    clearTimeout(timer);
    timer = window.setTimeout(() => {
      fill(label, title);
      fill(picture, icon("copy"));
    }, SHOWN_MS);
  });
  return button;
}

/** @param {string} text */
async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copyBySelection(text); // an address without https has no clipboard
  }
}

/** @param {string} text */
function copyBySelection(text) {
  const area = el("textarea.unseen", { "aria-hidden": "true", tabindex: -1 });
  area.value = text;
  document.body.append(area);
  const before = document.activeElement;
  area.select();
  const isDone = document.execCommand("copy");
  area.remove();
  if (before instanceof HTMLElement) before.focus();
  return isDone;
}
