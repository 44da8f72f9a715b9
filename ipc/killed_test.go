package ipc

const helperPathEnv = "KVAGENT_IPC_TEST_SOCKET"

func helperMain(path string) {}
