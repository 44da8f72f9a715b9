package ipc

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvagent/kvagent/ipc/peercred"
)

// TestHandshake expects a client that speaks the agent's version among others to be welcome, and
// another one to be refused with both named.
func TestHandshake(t *testing.T) {
	for _, v := range []struct {
		least, most uint32
		ok          bool
	}{
		{Version, Version, true}, {1, Version, true}, {Version, Version + 6, true},
		{Version + 1, Version + 2, false}, {1, Version - 1, false},
	} {
		agent, raw := rawPair(t)
		client, err := NewConn(raw, false)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		if err := client.Send(&Hello{MinVersion: v.least, MaxVersion: v.most, Software: "test"}); err != nil {
			t.Fatal(err)
		}
		hello, agentErr := ServeHandshake(agent, Welcome{Boot: testBoot, Session: 9, LeaseBytes: 2})
		m, _, err := client.Recv()
		if w, is := m.(*Welcome); is != v.ok || is && (w.Version != Version || w.Boot != testBoot || w.Session != 9 ||
			w.LeaseBytes != 2 || hello == nil || hello.Software != "test") {
			t.Errorf("%+v: %+v, %v", v, m, err)
		}
		if v.ok {
			continue
		}
		e, _ := m.(*Error)
		want := fmt.Sprintf("%d to %d, allowed is %d", v.least, v.most, Version)
		if e == nil || e.Code != ErrCodeVersion || agentErr == nil || !strings.Contains(agentErr.Error(), want) ||
			!strings.Contains(e.Text, want) {
			t.Errorf("%+v: agent %v, client %+v, want both in them", v, agentErr, m)
		}
	}
}

// TestHandshakeNoHello expects an error that says so for a peer that does not begin with HELLO.
func TestHandshakeNoHello(t *testing.T) {
	for name, first := range map[string][]byte{"another message": frameOf(&Ping{Req: 1}),
		"nonsense": {0, 0, 0, 1, 0xc0}, "huge": {0xff, 0, 0, 0}} {
		agent, raw := rawPair(t)
		raw.Write(first)
		if _, err := ServeHandshake(agent, Welcome{}); err == nil {
			t.Errorf("%s: accepted", name)
		}
		client, err := NewConn(raw, false)
		if err != nil {
			t.Fatal(err)
		}
		defer client.Close()
		m, _, err := client.Recv()
		if e, ok := m.(*Error); !ok || e.Code != ErrCodeMalformed {
			t.Errorf("%s: told %+v, %v, want ERROR malformed", name, m, err)
		}
	}
}

// Peers who are on neither list are refused with a reason; a group opens the door as well as a
// user.
func TestSessionPermission(t *testing.T) {
	me, mine := uint32(os.Geteuid()), uint32(os.Getegid())
	groups, err := os.Getgroups()
	if err != nil {
		t.Fatal(err)
	}
	type list = []uint32
	for name, v := range map[string]struct {
		uids, gids list
		ok         bool
	}{
		"by default": {nil, nil, true}, "uid": {list{me}, nil, true}, "gid": {list{}, list{mine},
			true}, "other uid": {list{me + 12345}, nil, false},
		"other gid": {nil, list{mine + 12345}, false}, "one of two": {list{me + 12345}, list{mine}, true},
	} {
		checkPermission(t, name, v.uids, v.gids, v.ok)
	}
	for _, g := range groups {
		checkPermission(t, fmt.Sprint("supplementary group ", g), nil, list{uint32(g)}, true)
	}
}

func checkPermission(t *testing.T, name string, uids, gids []uint32, ok bool) {
	t.Helper()
	refused := make(chan peercred.Cred, 1)
	l := listenSession(t, SessionOptions{
		UIDs: uids, GIDs: gids, OnRefused: func(p peercred.Cred, _ error) { refused <- p },
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			ServeHandshake(c, Welcome{})
			c.Close()
		}
	})
	c, _, err := DialSession(t.Context(), l.o.Path, "test")
	if ok {
		if err != nil {
			t.Errorf("%s: %v", name, err)
		} else {
			c.Close()
		}
	} else {
		var e *Error
		if !errors.As(err, &e) || e.Code != ErrCodePermission || !strings.Contains(e.Text, "allowed are uids") {
			t.Errorf("%s: %v, want ERROR permission", name, err)
		}
		select {
		case p := <-refused:
			if p.Uid != uint32(os.Geteuid()) {
				t.Errorf("%s: refused %+v", name, p)
			}
		case <-time.After(testTimeout):
			t.Errorf("%s: no peer was refused", name)
		}
	}
	l.Close()
	wg.Wait()
}

func TestPeerGroups(t *testing.T) {
	p := peercred.Cred{Gid: 5, Groups: []uint32{7, 9}}
	for gid, want := range map[uint32]bool{5: true, 7: true, 9: true, 8: false} {
		if p.InGroups([]uint32{1, gid}) != want {
			t.Errorf("group %d: want %v", gid, want)
		}
	}
	agent, _ := rawPair(t)
	groups, _ := os.Getgroups()
	for _, g := range groups {
		if !slices.Contains(agent.Peer().Groups, uint32(g)) {
			t.Errorf("group %d is not in %v", g, agent.Peer().Groups)
		}
	}
}
