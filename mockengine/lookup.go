package mockengine

import (
	"time"

	"github.com/kvagent/kvagent/ipc"
	"github.com/kvagent/kvagent/mockengine/zmtp"
)

// LookupClient asks a look-up socket, one question at a time, as zmtp.Socket does.
type LookupClient struct{ *zmtp.Socket }

// DialLookup returns a client of the look-up socket at path. It connects at the first question.
func DialLookup(path string) *LookupClient { return &LookupClient{zmtp.Dial(path)} }

// Ask asks in the own form, whatever r.Form is. A timeout of 0 is a second.
func (l *LookupClient) Ask(r *ipc.LookupRequest, timeout time.Duration) (ipc.LookupReply, error) {
	var f ipc.Frames
	if err := ipc.AppendRequest(&f, r); err != nil {
		return ipc.LookupReply{}, err
	}
	answer, err := l.Exchange([][]byte{f.At(0)}, timeout)
	if err != nil {
		return ipc.LookupReply{}, err
	}
	return ipc.DecodeReply(answer)
}
