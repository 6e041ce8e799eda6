/**
 * Light or dark: as the system has it, or as the visitor has chosen.
 *
 * `boot` sets the choice before anything is drawn.
 */

import { el, fill, icon } from "./element.js";

const KEY = "openenv-theme";

/** What is shown now. @returns {"light" | "dark"} */
export function currentTheme() {
  const chosen = document.documentElement.dataset.theme;
  if (chosen === "light" || chosen === "dark") return chosen;
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

/** The button that changes it. */
export function themeButton() {
  const button = el("button.small.quiet", { type: "button" });
  const draw = () => {
    const next = currentTheme() === "dark" ? "light" : "dark";
    button.title = `Switch to ${next} colours`;
    button.setAttribute("aria-label", button.title);
    fill(button, icon(next === "dark" ? "moon" : "sun"));
  };
  button.addEventListener("click", () => {
    const next = currentTheme() === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = next;
    try {
      localStorage.setItem(KEY, next);
    } catch {
      // A browser that keeps nothing still shows it.
    }
    draw();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
  return button;
}

/**
 * The name plate: what this page is part of, where to read more, and the colours.
 * @param {object} options
 * @param {string} [options.version]
 * @param {string} [options.docs] - An address.
 */
export function namePlate({ version = "", docs = "" }) {
  return el(
    "nav.plate",
    { "aria-label": "OpenEnv" },
    el("span.plate-name", {}, "OpenEnv", version && el("span.version", {}, version)),
    docs && el("a", { href: docs, target: "_blank", rel: "noopener noreferrer" }, "API docs"),
    themeButton(),
  );
}
