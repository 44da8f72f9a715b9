package servertest

import (
	"net"
	"testing"
)

// Redis starts a redis-server, or a valkey-server, without persistence and with additional
// arguments.
func Redis(t testing.TB, args ...string) *Server {
	t.Helper()
	program := find(t, "redis-server", "apt-get install redis-server")
	s := &Server{t: t, program: program, Addr: FreeAddr(t), Dir: t.TempDir()}
	_, port, _ := net.SplitHostPort(s.Addr)
	s.args = append([]string{
		"--bind", "127.0.0.1", "--port", port, "--save", "", "--appendonly", "no", "--daemonize", "no",
	}, args...)
	t.Cleanup(s.Kill)
	s.start()
	return s
}

// Sentinel starts a sentinel with the configuration file conf, which it rewrites.
func Sentinel(t testing.TB, conf string) *Server {
	t.Helper()
	s := &Server{t: t, program: find(t, "redis-server", "apt-get install redis-server"), Addr: FreeAddr(t),
		Dir: t.TempDir()}
	_, port, _ := net.SplitHostPort(s.Addr)
	s.args = []string{conf, "--sentinel", "--bind", "127.0.0.1", "--port", port}
	t.Cleanup(s.Kill)
	s.start()
	return s
}
