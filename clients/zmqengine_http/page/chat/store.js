// Chats and settings, kept in this browser and nowhere else.
const settings = { presets: [], ...JSON.parse(localStorage.getItem("zmqengine-settings") || "{}") };
const keepSettings = () => localStorage.setItem("zmqengine-settings", JSON.stringify(settings));

const database = new Promise((go, fail) => {
  const request = indexedDB.open("zmqengine", 1);
  request.onupgradeneeded = () => request.result.createObjectStore("chats", { keyPath: "id" });
  request.onsuccess = () => {
    // A newer page of another tab may change the form: this one lets go.
    request.result.onversionchange = () => request.result.close();
    go(request.result);
  };
  request.onerror = () => fail(request.error);
});

const inStore = async (mode, act) => {
  const chats = (await database).transaction("chats", mode).objectStore("chats");
  const request = act(chats);
  return new Promise((go, fail) => {
    request.onsuccess = () => go(request.result);
    request.onerror = () => fail(request.error);
  });
};

const store = {
  all: () => inStore("readonly", (chats) => chats.getAll()),
  keep: (each) => inStore("readwrite", (chats) => chats.put(structuredClone(each))),
  drop: (id) => inStore("readwrite", (chats) => chats.delete(id)),
};

const saveFile = (name, text, kind) => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
