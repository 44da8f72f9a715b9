package servertest

import (
	"os"
	"path/filepath"
	"testing"
)

// The keys of the S3 service.
const (
	S3AccessKey = "kvagent-test"
	S3SecretKey = "not-a-secret"
)

// S3 starts a versitygw, whose buckets are folders of Dir; one named bucket is there.
func S3(t testing.TB, bucket string) *Server {
	t.Helper()
	s := &Server{t: t, Addr: FreeAddr(t), Dir: t.TempDir()}
	s.program = find(t, "versitygw", "go install github.com/versity/versitygw/cmd/versitygw@v1.8.0")
	if err := os.Mkdir(filepath.Join(s.Dir, bucket), 0o755); err != nil {
		t.Fatal(err)
	}
	s.args = []string{"--keep-alive", "--port", s.Addr, "posix", s.Dir} // as services do; without it every request is a new connection
	s.env = []string{"ROOT_ACCESS_KEY=" + S3AccessKey, "ROOT_SECRET_KEY=" + S3SecretKey}
	t.Cleanup(s.Kill)
	s.start()
	return s
}
