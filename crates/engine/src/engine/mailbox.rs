//! What passes between a client and the engine's thread. The lock covers swaps and appends, never work.

use std::sync::{Condvar, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use crate::recorder::Recording;
use crate::scheduler::{Rejection, RequestId};
use crate::window::Window;

use super::flight::Flight;
use super::{FinishEvent, Outbox, Request};

/// What a client asks for.
pub(super) enum Command {
    /// A request and when it was submitted.
    Submit(Request, u64),
    Abort(RequestId),
    BeginMeasurement(Vec<Window>),
    UsePerfectRouter(bool),
    Shutdown,
}

struct Mailbox {
    commands: Vec<Command>,
    outbox: Outbox,
    /// Something the client waits for has happened.
    news: bool,
    stopped: bool,
    /// The task that waits for news, if one does.
    task: Option<Waker>,
}

/// The mailbox and who sleeps beside it.
pub(super) struct Shared {
    mailbox: Mutex<Mailbox>,
    to_engine: Condvar,
    to_client: Condvar,
}

impl Shared {
    pub(super) fn new(outbox: Outbox) -> Shared {
        let mailbox = Mailbox { commands: Vec::new(), outbox, news: false, stopped: false, task: None };
        Shared { mailbox: Mutex::new(mailbox), to_engine: Condvar::new(), to_client: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, Mailbox> {
        // A panic on the other side leaves plain data behind; the panic itself is reported by `shutdown`.
        self.mailbox.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// The client's side.
impl Shared {
    pub(super) fn send(&self, commands: impl IntoIterator<Item = Command>) {
        // Whatever the caller does to make them is done before.
        let mut commands: Vec<Command> = commands.into_iter().collect();
        self.lock().commands.append(&mut commands);
        self.to_engine.notify_one();
    }

    /// See [`super::Engine::wait`].
    pub(super) fn wait(&self, outbox: &mut Outbox, timeout: Duration) -> bool {
        outbox.clear();
        let mut mailbox = self.lock();
        if !mailbox.news && !mailbox.stopped {
            mailbox = self.to_client.wait_timeout(mailbox, timeout).unwrap_or_else(|e| e.into_inner()).0;
        }
        mailbox.take(outbox)
    }

    /// See [`super::Engine::poll_wait`].
    pub(super) fn poll_wait(&self, task: &mut Context<'_>, outbox: &mut Outbox) -> Poll<bool> {
        outbox.clear();
        let mut mailbox = self.lock();
        if mailbox.news || mailbox.stopped {
            return Poll::Ready(mailbox.take(outbox));
        }
        if !mailbox.task.as_ref().is_some_and(|known| known.will_wake(task.waker())) {
            mailbox.task = Some(task.waker().clone());
        }
        Poll::Pending
    }

    /// What is left to hear once the engine's thread has ended.
    pub(super) fn rest(&self) -> Outbox {
        std::mem::take(&mut self.lock().outbox)
    }
}

impl Mailbox {
    /// Swap what there is to hear into `outbox`, which is empty; says whether the engine runs.
    fn take(&mut self, outbox: &mut Outbox) -> bool {
        self.news = false;
        std::mem::swap(&mut self.outbox, outbox);
        !self.stopped
    }
}

/// The engine's side.
impl Shared {
    /// Swap the commands that came into `commands`, which is empty.
    pub(super) fn take_commands(&self, commands: &mut Vec<Command>) {
        let mut mailbox = self.lock();
        if !mailbox.commands.is_empty() {
            std::mem::swap(&mut mailbox.commands, commands);
        }
    }

    /// Sleep until there is a command. Idle is news in itself: a client that waits for the last answer must not wait for its
    /// timeout.
    pub(super) fn wait_for_commands(&self) {
        self.announce(self.lock());
        let mut mailbox = self.lock();
        while mailbox.commands.is_empty() {
            mailbox = self.to_engine.wait(mailbox).unwrap_or_else(|e| e.into_inner());
        }
    }

    /// Hand over what a step has brought, with its record and its `expert_counts` where iterations are `measured`: all in
    /// one go, so that whoever hears of an answer finds its iteration too. The client wakes where somebody waits for it.
    pub(super) fn hand_over(
        &self,
        flight: &Flight,
        expert_counts: &[u32],
        measured: bool,
        recording: Option<Recording>,
    ) {
        let wakes = flight.wakes || !flight.finished.is_empty() || recording.is_some();
        let mut mailbox = self.lock();
        let outbox = &mut mailbox.outbox;
        outbox.tokens.extend_from_slice(&flight.tokens);
        outbox.finished.extend_from_slice(&flight.finished);
        if measured {
            let mut record = flight.record;
            record.decisions = (outbox.decisions.len() as u32, flight.decisions.len() as u32);
            outbox.decisions.extend_from_slice(&flight.decisions);
            outbox.expert_counts.extend_from_slice(expert_counts);
            outbox.iterations.push(record);
        }
        outbox.recordings.extend(recording);
        if wakes {
            self.announce(mailbox);
        }
    }

    /// Say that a request has ended outside of any step.
    pub(super) fn finished(&self, event: FinishEvent) {
        let mut mailbox = self.lock();
        mailbox.outbox.finished.push(event);
        self.announce(mailbox);
    }

    /// Say that a request can't run.
    pub(super) fn rejected(&self, request: RequestId, why: Rejection) {
        let mut mailbox = self.lock();
        mailbox.outbox.rejected.push((request, why));
        self.announce(mailbox);
    }

    /// Hand over what is left of a measurement; nobody wakes for it.
    pub(super) fn close_measurement(&self, cut: Option<Recording>, unreached: Vec<Window>, notes: Vec<String>) {
        let outbox = &mut self.lock().outbox;
        outbox.recordings.extend(cut);
        outbox.unreached.extend(unreached);
        outbox.notes.extend(notes);
    }

    /// A new measurement begins: what nobody has heard of the last one's iterations is not told any more.
    pub(super) fn forget_iterations(&self) {
        self.lock().outbox.forget_iterations();
    }

    /// The engine's thread ends: whoever waits must hear of it.
    pub(super) fn stop(&self) {
        let mut mailbox = self.lock();
        mailbox.stopped = true;
        // Even of a client that was called and has not looked yet.
        mailbox.news = false;
        self.announce(mailbox);
    }

    /// Call the client, after letting go of the mailbox it will look into. One that was called before and has not looked
    /// yet needs no second call.
    fn announce(&self, mut mailbox: MutexGuard<'_, Mailbox>) {
        if std::mem::replace(&mut mailbox.news, true) {
            return;
        }
        let task = mailbox.task.take();
        drop(mailbox);
        self.to_client.notify_all();
        if let Some(task) = task {
            task.wake();
        }
    }
}
