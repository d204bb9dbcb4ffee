"use strict";
// What a mark says is shown where the pointer or the keyboard is; screen readers read the same text.
const tip = document.getElementById("tip");
function show(mark) {
  const box = mark.getBoundingClientRect();
  tip.textContent = mark.getAttribute("aria-label");
  tip.hidden = false;
  const left = Math.min(Math.max(4, box.left), window.innerWidth - tip.offsetWidth - 4);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${left}px`;
  tip.style.top = `${above > 0 ? above : box.bottom + 6}px`;
}
function hide() { tip.hidden = true; }
for (const plot of document.querySelectorAll(".plot")) {
  const marks = [...plot.querySelectorAll("[aria-label]:not(.role-axis):not(.role-legend)")].filter((mark) => mark.closest("svg"));
  let at = -1;
  plot.addEventListener("pointerover", (event) => {
    const mark = event.target.closest("[aria-label]");
    if (marks.includes(mark)) show(mark); else hide();
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (event.key === "Escape") { hide(); return; }
    if (!step || !marks.length) return;
    event.preventDefault();
    at = (at + step + marks.length) % marks.length;
    marks[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    show(marks[at]);
  });
}
window.addEventListener("scroll", hide, { passive: true });
