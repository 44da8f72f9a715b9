//go:build nozmq

package main

import (
	"errors"
	"sync/atomic"
)

// echoServer is libzmq's, which is not in this program.
type echoServer struct {
	path  string
	reply atomic.Int32
}

func newEchoServer(string) (*echoServer, error) {
	return nil, errors.New("bench lookup compares with libzmq, and this program is built without it (build tag nozmq)")
}

func (e *echoServer) close() error { return nil }
