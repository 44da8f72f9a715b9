package servertest

import (
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

// Redis starts a redis-server, or a valkey-server, without persistence and with additional
// arguments.
func Redis(t testing.TB, args ...string) *Server {
	t.Helper()
	s := newServer(t, "redis-server", "apt-get install redis-server")
	s.run(append([]string{
		"--bind", "127.0.0.1", "--port", s.port(), "--save", "", "--appendonly", "no", "--daemonize", "no",
	}, args...)...)
	return s
}

// Sentinel starts a sentinel with the configuration file conf, which it rewrites.
func Sentinel(t testing.TB, conf string) *Server {
	t.Helper()
	s := newServer(t, "redis-server", "apt-get install redis-server")
	s.run(conf, "--sentinel", "--bind", "127.0.0.1", "--port", s.port())
	return s
}

// Credentials of the S3 service.
const (
	S3AccessKey = "kvagent-test"
	S3SecretKey = "not-a-secret"
)

// S3 starts a versitygw with additional arguments. Its buckets are folders of Dir; it has one
// bucket.
func S3(t testing.TB, bucket string, args ...string) *Server {
	t.Helper()
	s := newServer(t, "versitygw", "go install github.com/versity/versitygw/cmd/versitygw@v1.8.0")
	if err := os.Mkdir(filepath.Join(s.Dir, bucket), 0o755); err != nil {
		t.Fatal(err)
	}
	// Services keep connections open; without the option every request would need a new one.
	s.env = []string{"ROOT_ACCESS_KEY=" + S3AccessKey, "ROOT_SECRET_KEY=" + S3SecretKey}
	s.run(slices.Concat([]string{"--keep-alive", "--port", s.Addr}, args, []string{"posix", s.Dir})...)
	return s
}

// withMooncake tells how to have Mooncake's programs.
const withMooncake = `PATH="$(scripts/env mooncake):$PATH"`

// Mooncake starts a mooncake_master with additional arguments, and returns it and the Python that
// has its client. It keeps no data across restarts.
func Mooncake(t testing.TB, args ...string) (master *Server, python string) {
	t.Helper()
	s := newServer(t, "mooncake_master", withMooncake)
	s.Admin = FreeAddr(t)
	_, admin, _ := net.SplitHostPort(s.Admin)
	s.run(append([]string{
		"--rpc_address=127.0.0.1", "--rpc_port=" + s.port(), "--metrics_host=127.0.0.1",
		"--metrics_port=" + admin, "--rpc_thread_num=2",
	}, args...)...)
	return s, pythonBeside(t, s.program)
}

// MooncakePython returns the Python that has Mooncake's client and its transfer engine.
func MooncakePython(t testing.TB) string {
	t.Helper()
	return pythonBeside(t, find(t, "mooncake_master", withMooncake))
}

func pythonBeside(t testing.TB, program string) string {
	t.Helper()
	real, err := filepath.EvalSymlinks(program)
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(filepath.Dir(real), "python")
}
