"use strict";
/* All figures: tooltips of marks, and arrow keys on maps. Numbers come from the page's data. */
const data = JSON.parse(document.getElementById("data").textContent);
const tip = document.getElementById("tip");
function hide() { tip.hidden = true; }
function tipOf(mark) {
  if (mark.matches(".term")) return document.getElementById(mark.hash.slice(1)).textContent;
  if (mark.hasAttribute("aria-label")) return mark.getAttribute("aria-label");
  const [number, index] = mark.dataset.mark.split(",");
  return data.charts[mark.closest("[data-chart]").dataset.chart][number].tips[index];
}
function show(mark) {
  tip.textContent = tipOf(mark);
  tip.hidden = false;
  const target = mark.getBoundingClientRect(), box = tip.getBoundingClientRect();
  const left = Math.min(Math.max(4, target.left + target.width / 2 - box.width / 2), innerWidth - box.width - 4);
  const top = target.top - box.height - 8;
  tip.style.left = left + "px";
  tip.style.top = (top > 4 ? top : target.bottom + 8) + "px";
}
function showTip(event) {
  const mark = event.target.closest("[data-mark], .term");
  if (mark) show(mark); else hide();
}
document.addEventListener("pointerover", showTip);
document.addEventListener("focusin", showTip);
document.addEventListener("focusout", hide);
document.addEventListener("click", event => { /* explain a term in place; without a script its link leads to the glossary */
  const term = event.target.closest(".term");
  if (!term) return;
  event.preventDefault();
  show(term);
});
document.addEventListener("scroll", hide, { passive: true, capture: true });
document.addEventListener("keydown", event => { if (event.key === "Escape") hide(); });
const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
function make(parent, tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return parent.appendChild(node);
}
const FILLED = 0.92; /* painted share of a cell's width and height */
/* Lay invisible squares over a map's cells, row by row, that show tooltips and take keyboard focus. */
function activate(map, rows) {
  const [columns, step, left, top] = map.dataset.map.split(" ").map(Number), group = make(map, "g", {});
  const cells = Array.from({ length: rows * columns }, (_, index) => make(group, "rect", {
    class: "cell", role: "img", "data-mark": "", tabindex: index ? "-1" : "0", width: FILLED * step, height: FILLED * step,
    x: left + index % columns * step, y: top + Math.floor(index / columns) * step,
  }));
  map.setAttribute("role", "group");
  map.addEventListener("keydown", event => {
    const move = steps[event.key], from = cells.indexOf(event.target);
    if (!move || from < 0) return;
    event.preventDefault();
    const column = from % columns + move[0], next = cells[from + move[0] + columns * move[1]];
    if (!next || !next.isConnected || column < 0 || column >= columns) return;
    event.target.setAttribute("tabindex", "-1");
    next.setAttribute("tabindex", "0");
    next.focus();
  });
  return cells;
}
function headLabel(index, columns) { return "Layer " + index % columns + ", KV head " + Math.floor(index / columns); }
for (const map of document.querySelectorAll("svg[data-map]")) {
  const [{ values, words }] = data.charts[map.dataset.chart] || [{}];
  if (!words) continue;
  const columns = values[0].length;
  activate(map, values.length).forEach((cell, index) => {
    const value = values[Math.floor(index / columns)][index % columns];
    if (value === null) return cell.remove();
    cell.setAttribute("aria-label", headLabel(index, columns) + ": " + words.replace("%", (100 * value).toFixed(1)));
  });
}
/* Copy commands to the clipboard. */
async function copy(code, status) {
  try {
    await navigator.clipboard.writeText(code.textContent);
    status.textContent = "copied";
  } catch {
    getSelection().selectAllChildren(code);
    status.textContent = "selected: copy it with the keyboard";
  }
}
for (const button of document.querySelectorAll("[data-copy]")) {
  button.hidden = false;
  button.addEventListener("click", () => copy(document.getElementById(button.dataset.copy), button.nextElementSibling));
}
/* Decompress base64-encoded gzip data to text. */
async function gunzip(base64) {
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
