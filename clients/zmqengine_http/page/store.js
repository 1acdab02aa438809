// Chats and settings, kept in this browser and nowhere else.
const settings = { presets: [], ...JSON.parse(localStorage.getItem("zmqengine-settings") || "{}") };
const keepSettings = () => localStorage.setItem("zmqengine-settings", JSON.stringify(settings));

const database = new Promise((go, fail) => {
  const asked = indexedDB.open("zmqengine", 1);
  asked.onupgradeneeded = () => asked.result.createObjectStore("chats", { keyPath: "id" });
  asked.onsuccess = () => {
    // A newer page of another tab may change the form: this one lets go.
    asked.result.onversionchange = () => asked.result.close();
    go(asked.result);
  };
  asked.onerror = () => fail(asked.error);
});

const inStore = async (mode, act) => {
  const chats = (await database).transaction("chats", mode).objectStore("chats");
  const asked = act(chats);
  return new Promise((go, fail) => {
    asked.onsuccess = () => go(asked.result);
    asked.onerror = () => fail(asked.error);
  });
};

const store = {
  all: () => inStore("readonly", (chats) => chats.getAll()),
  keep: (chat) => inStore("readwrite", (chats) => chats.put(structuredClone(chat))),
  drop: (id) => inStore("readwrite", (chats) => chats.delete(id)),
};

const saveFile = (name, text, kind) => {
  const link = element("a");
  link.href = URL.createObjectURL(new Blob([text], { type: kind }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
};
