"use strict";
// Tabs, filters of tables, and the start. The packs of trajectories come after this script, so the viewer waits for them.

const TABS = [...document.querySelectorAll("[role=tab]")];

function showTab(name) {
  for (const tab of TABS) {
    const chosen = tab.dataset.tab === name;
    tab.ariaSelected = String(chosen);
    document.getElementById(`tab-${tab.dataset.tab}`).hidden = !chosen;
  }
  dispatchEvent(new Event("resize")); // plots that were drawn unseen take their width
}

function tabOfAddress() {
  const name = location.hash.slice(1).split("=")[0];
  return TABS.some((tab) => tab.dataset.tab === name) ? name : "overview";
}

for (const tab of TABS) {
  tab.addEventListener("click", () => {
    history.replaceState(null, "", `#${tab.dataset.tab}`);
    showTab(tab.dataset.tab);
  });
}
addEventListener("hashchange", () => showTab(tabOfAddress()));

for (const box of document.querySelectorAll("input.filter")) {
  box.addEventListener("input", () => {
    const words = box.value.trim().toLowerCase();
    for (const row of box.parentElement.querySelectorAll("tbody tr")) {
      row.hidden = !row.textContent.toLowerCase().includes(words);
    }
  });
}

async function showTrajectories() {
  if (!document.getElementById("index")) return;
  const records = new Records(JSON.parse(await unpack("index")));
  new Viewer(records);
  for (const note of records.notes) document.getElementById("filters").append(make("p", { className: "note" }, note));
  document.documentElement.dataset.ready = "true"; // everything can be used
}

showTab(tabOfAddress());
document.addEventListener("DOMContentLoaded", () => { // the data stands behind the scripts
  showCurves().then(showTrajectories);
});
