package zmqclient

import (
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvagent/kvagent/ipc"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// socketDir is a short directory of its own: socket paths have 107 bytes.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kv")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func testContext(t testing.TB) *Context {
	t.Helper()
	c, err := NewContext()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	return c
}

func echoHandler(r *ipc.LookupRequest, _ time.Time) ipc.LookupReply {
	return ipc.LookupReply{Tokens: uint32(r.Tokens)}
}

func serveLookups(t testing.TB, dir, name string, h ipc.LookupHandler) *ipc.LookupServer {
	t.Helper()
	c := ipc.NewContext()
	t.Cleanup(func() {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	s, err := c.ListenLookup(ipc.LookupOptions{Dir: dir, Name: name}, h)
	if err != nil {
		t.Fatal(err)
	}
	return s
}
