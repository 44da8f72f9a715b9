package ipc

import (
	"testing"

	"github.com/kvagent/kvagent/pool/pooltest"
)

// A frame of the peer is unserved from the moment that its Send has returned until the reader
// says that it was served, or asks for more; half a frame is, too.
func TestUnserved(t *testing.T) {
	agent, client := sessionPair(t)
	if agent.Unserved() {
		t.Error("something is unserved before anything was sent")
	}
	for range 2 {
		if err := client.Send(&Ping{Req: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if !agent.Unserved() {
		t.Error("what was sent is served before it was received")
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	agent.Served()
	if !agent.Unserved() {
		t.Error("the second message counts as served with the first")
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	if !agent.Unserved() {
		t.Error("a message counts as served when it was received")
	}
	agent.Served()
	if agent.Unserved() {
		t.Error("what was served counts as unserved")
	}
	if err := client.Send(&Ping{Req: 1}); err != nil {
		t.Fatal(err)
	}
	if _, _, err := agent.Recv(); err != nil {
		t.Fatal(err)
	}
	over := make(chan error, 1)
	go func() {
		_, _, err := agent.Recv()
		over <- err
	}()
	pooltest.Until(t, "Recv asks for more", func() bool { return !agent.Unserved() })
	agent.Close()
	<-over
}

// Nobody waits for the messages of a session that has ended, whether its end was read or not.
func TestUnservedAtTheEnd(t *testing.T) {
	agent, raw := rawPair(t)
	if _, err := raw.Write([]byte{0, 0, 0, 9, 1}); err != nil { // of a frame
		t.Fatal(err)
	}
	if !agent.Unserved() {
		t.Error("half a frame counts as nothing")
	}
	raw.Close()
	if _, _, err := agent.Recv(); err == nil {
		t.Error("half a frame was received")
	}
	if agent.Unserved() {
		t.Error("a session whose end was read is waited for")
	}
	agent, client := sessionPair(t)
	if err := client.Send(&Ping{Req: 1}); err != nil {
		t.Fatal(err)
	}
	agent.Close()
	if agent.Unserved() {
		t.Error("a session that was closed is waited for")
	}
}
