package ipc

import (
	"errors"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// No server, a silent one, one that was restarted: the client answers in time and goes on.
func TestLookupClientTimeouts(t *testing.T) {
	dir := socketDir(t)
	path := filepath.Join(dir, "lookup")
	l := DialLookup(path)
	defer l.Close()
	if _, err := l.Ask(&LookupRequest{}, 50*time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Fatalf("no server: %v", err)
	}
	release, asked := make(chan struct{}), make(chan struct{}, 1)
	s := serveLookups(t, dir, "lookup", func(r *LookupRequest, _ time.Time) LookupReply {
		if r.Tokens == 1 {
			asked <- struct{}{}
			<-release
		}
		return LookupReply{Tokens: uint32(r.Tokens)}
	})
	if _, err := l.Ask(&LookupRequest{Tokens: 1}, 200*time.Millisecond); !errors.Is(err, ErrTimeout) {
		t.Fatalf("a silent server: %v", err)
	}
	<-asked
	close(release)
	// The answer to the first question is never taken for the second's.
	if a, err := l.Ask(&LookupRequest{Tokens: 2}, 5*time.Second); err != nil || a.Tokens != 2 {
		t.Fatalf("after the time-out: %+v, %v", a, err)
	}
	s.Close()
	serveLookups(t, dir, "lookup", echoHandler)
	deadline := time.Now().Add(10 * time.Second)
	for {
		a, err := l.Ask(&LookupRequest{Tokens: 3}, 200*time.Millisecond)
		if err == nil && a.Tokens == 3 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("after a restart: %+v, %v", a, err)
		}
	}
}

func TestLookupClientRefuses(t *testing.T) {
	l := DialLookup("/tmp/" + strings.Repeat("x", MaxSocketPath))
	if _, err := l.Ask(&LookupRequest{}, 0); err == nil || !strings.Contains(err.Error(), "allowed is 1 to 107") {
		t.Errorf("a long path: %v", err)
	}
	var m *MalformedError
	if _, err := l.Ask(&LookupRequest{HashLen: 33, Hashes: make([]byte, 33)}, 0); !errors.As(err, &m) {
		t.Errorf("a long hash: %v", err)
	}
	l.Close()
	if _, err := l.Ask(&LookupRequest{}, 0); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

// The server makes nothing per request, however many hashes it has. The test's client allocates
// nothing either.
func TestLookupAllocations(t *testing.T) {
	s := serveLookups(t, socketDir(t), "l", func(*LookupRequest,
		time.Time) LookupReply {
		return LookupReply{}
	})
	l := DialLookup(s.Path())
	defer l.Close()
	for _, form := range []Form{FormOwn, FormUpstream, FormAscend4, FormSimple} {
		r := &LookupRequest{Form: form, HashLen: 32, Hashes: make([]byte, 32*2048), Tokens: 1}
		ask := func() {
			if _, err := l.askForm(r, 5*time.Second); err != nil {
				t.Fatal(err)
			}
		}
		ask()
		if n := testing.AllocsPerRun(50, ask); n > 3 {
			t.Errorf("%v: %v allocations per request, allowed is 3", form, n)
		}
	}
}
