package servertest

import (
	"net"
	"path/filepath"
	"testing"
)

// Mooncake starts a mooncake_master with additional arguments, and returns it and the Python that
// has its client. It keeps no data across restarts.
func Mooncake(t testing.TB, args ...string) (master *Server, python string) {
	t.Helper()
	program := find(t, "mooncake_master", `PATH="$(scripts/env mooncake):$PATH"`)
	s := &Server{t: t, program: program, Addr: FreeAddr(t), Dir: t.TempDir()}
	_, port, _ := net.SplitHostPort(s.Addr)
	s.Admin = FreeAddr(t)
	_, admin, _ := net.SplitHostPort(s.Admin)
	s.args = append([]string{
		"--rpc_address=127.0.0.1", "--rpc_port=" + port, "--metrics_host=127.0.0.1",
		"--metrics_port=" + admin, "--rpc_thread_num=2",
	}, args...)
	t.Cleanup(s.Kill)
	s.start()
	return s, pythonBeside(t, program)
}

// MooncakePython returns the Python that has Mooncake's client and its transfer engine.
func MooncakePython(t testing.TB) string {
	t.Helper()
	return pythonBeside(t, find(t, "mooncake_master", `PATH="$(scripts/env mooncake):$PATH"`))
}

func pythonBeside(t testing.TB, program string) string {
	t.Helper()
	real, err := filepath.EvalSymlinks(program)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(filepath.Dir(real), "python")
}
