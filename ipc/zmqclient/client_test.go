package zmqclient

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc"
)

// No server, a silent one, one that was restarted: the client answers in time and goes on.
func TestTimeouts(t *testing.T) {
	dir := socketDir(t)
	path := filepath.Join(dir, "lookup")
	l := Dial(path)
	defer l.Close()
	start := time.Now()
	if _, err := l.Ask(&ipc.LookupRequest{}, 50*time.Millisecond); !errors.Is(err, ipc.ErrTimeout) ||
		time.Since(start) > 2*time.Second {
		t.Fatalf("no server: %v after %v", err, time.Since(start))
	}
	release, asked := make(chan struct{}), make(chan struct{}, 1)
	s := serveLookups(t, dir, "lookup", func(r *ipc.LookupRequest, _ time.Time) ipc.LookupReply {
		if r.Tokens == 1 {
			asked <- struct{}{}
			<-release
		}
		return ipc.LookupReply{Tokens: uint32(r.Tokens)}
	})
	if _, err := l.Ask(&ipc.LookupRequest{Tokens: 1}, 200*time.Millisecond); !errors.Is(err, ipc.ErrTimeout) {
		t.Fatalf("a silent server: %v", err)
	}
	<-asked
	close(release)
	// The answer to the first question is never taken for the second's.
	if a, err := l.Ask(&ipc.LookupRequest{Tokens: 2}, 5*time.Second); err != nil || a.Tokens != 2 {
		t.Fatalf("after the time-out: %+v, %v", a, err)
	}
	s.Close()
	serveLookups(t, dir, "lookup", echoHandler)
	deadline := time.Now().Add(10 * time.Second)
	for {
		a, err := l.Ask(&ipc.LookupRequest{Tokens: 3}, 200*time.Millisecond)
		if err == nil && a.Tokens == 3 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a restart: %+v, %v", a, err)
		}
	}
}

func TestRefuses(t *testing.T) {
	l := Dial("/tmp/" + strings.Repeat("x", ipc.MaxSocketPath))
	if _, err := l.Ask(&ipc.LookupRequest{}, 0); err == nil || !strings.Contains(err.Error(), "allowed is 1 to 107") {
		t.Errorf("a long path: %v", err)
	}
	var m *ipc.MalformedError
	if _, err := l.Ask(&ipc.LookupRequest{HashLen: 33, Hashes: make([]byte, 33)}, 0); !errors.As(err, &m) {
		t.Errorf("a long hash: %v", err)
	}
	l.Close()
	if _, err := l.Ask(&ipc.LookupRequest{}, 0); !errors.Is(err, ipc.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The server makes nothing per request, however many hashes it has. The test's client allocates
// nothing either.
func TestAllocations(t *testing.T) {
	c := testContext(t)
	s := serveLookups(t, socketDir(t), "l", func(*ipc.LookupRequest,
		time.Time) ipc.LookupReply {
		return ipc.LookupReply{}
	})
	l := c.Dial(s.Path())
	defer l.Close()
	for _, form := range []ipc.Form{ipc.FormOwn, ipc.FormUpstream, ipc.FormAscend4, ipc.FormSimple} {
		r := &ipc.LookupRequest{Form: form, HashLen: 32, Hashes: make([]byte, 32*2048), Tokens: 1}
		ask := func() {
			if _, err := l.AskForm(r, 5*time.Second); err != nil {
				t.Fatal(err)
			}
		}
		ask()
		if n := testing.AllocsPerRun(50, ask); n > 3 {
			t.Errorf("%v: %v allocations per request, allowed is 3", form, n)
		}
	}
}
