package ipc

import (
	"errors"
	"fmt"
)

// Errors to branch on. The cause of a connection's end wraps one of them, io.EOF or the system's
// error.
var (
	ErrPeerDied = errors.New("the peer's process died")
	ErrStalled  = errors.New("the peer left a frame unfinished")
	ErrClosed   = errors.New("closed")
	ErrTimeout  = errors.New("no answer in time")
)

// Reason classifies malformed messages, for counters.
type Reason uint8

// The reasons.
const (
	ReasonEnvelope    Reason = iota // no empty delimiter before the request
	ReasonFrames                    // the number of frames and frame 0 fit no form
	ReasonTooLarge                  // more frames or bytes than a message may have
	ReasonMsgpack                   // truncated, not canonical, or of another type than the field
	ReasonFields                    // another number of fields, or bytes after the last
	ReasonRange                     // a number or the length of a field out of its range
	ReasonHex                       // a hash that is not lower-case hex of even length
	ReasonLengths                   // lengths that contradict each other
	ReasonVersion                   // a version, or a message, that this version lacks
	ReasonText                      // a str that is not UTF-8
	ReasonDescriptors               // another number of descriptors than the message names
	ReasonPanic                     // its reader panicked: a defect of the agent
	numReasons
)

var reasonNames = [numReasons]string{"envelope", "frames", "too_large", "msgpack", "fields", "range", "hex", "lengths",
	"version", "text", "descriptors", "panic"}

func (r Reason) String() string {
	if r < numReasons {
		return reasonNames[r]
	}
	return "unknown"
}

// MalformedError describes what is wrong with a message, and what is allowed.
type MalformedError struct {
	Reason  Reason
	Message string // its name in docs/PROTOCOL.md
	Field   string // its path in the message, "" for the message as a whole
	Detail  string // what was found, and what is allowed
}

func (e *MalformedError) Error() string {
	if e.Field == "" {
		return fmt.Sprintf("%s: %s", e.Message, e.Detail)
	}
	return fmt.Sprintf("%s: %s: %s", e.Message, e.Field, e.Detail)
}
