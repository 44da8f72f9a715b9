package servertest

import (
	"os"
	"path/filepath"
	"testing"
)

// Credentials of the S3 service.
const (
	S3AccessKey = "kvagent-test"
	S3SecretKey = "not-a-secret"
)

// S3 starts a versitygw with additional arguments. Its buckets are folders of Dir; it has one
// bucket.
func S3(t testing.TB, bucket string, args ...string) *Server {
	t.Helper()
	s := &Server{t: t, Addr: FreeAddr(t), Dir: t.TempDir()}
	s.program = find(t, "versitygw", "go install github.com/versity/versitygw/cmd/versitygw@v1.8.0")
	if err := os.Mkdir(filepath.Join(s.Dir, bucket), 0o755); err != nil {
		t.Fatal(err)
	}
	// Services keep connections open; without the option every request would need a new one.
	s.args = append([]string{"--keep-alive", "--port", s.Addr}, args...)
	s.args = append(s.args, "posix", s.Dir)
	s.env = []string{"ROOT_ACCESS_KEY=" + S3AccessKey, "ROOT_SECRET_KEY=" + S3SecretKey}
	t.Cleanup(s.Kill)
	s.start()
	return s
}
